"""Models that are made without memory for their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_EMPTY = frozenset({torch.empty, torch.empty_strided, torch.Tensor.new_empty})


class EmptyOnMeta(TorchFunctionMode):
    """While it is active, tensors that are made without values are on the device ``meta``.

    Those are the parameters of torch's modules before they are initialized. What is made with values, as
    tables of positions in buffers that no file holds, is as it would be. Of this thread only.

    >>> with EmptyOnMeta():
    ...     made = torch.nn.BatchNorm1d(3)
    >>> made.weight.device.type, made.running_mean.device.type
    ('meta', 'cpu')
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func in _EMPTY:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)
