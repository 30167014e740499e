"""Tensors of its own for a quantized model, so that nothing done to it reaches the model it came from.

What stays float (a layer norm, a bias) is shared by every step up to here; ``quantized.half()`` or
further training of the original would otherwise change both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["own_shared_tensors"]


def own_shared_tensors(module: nn.Module, source: nn.Module) -> None:
    """Replace what ``module`` shares with ``source`` by copies; ties and strides are kept.

    >>> source = nn.LayerNorm(2)
    >>> module = nn.Sequential(nn.Identity())
    >>> module[0].weight = source.weight
    >>> own_shared_tensors(module, source)
    >>> module[0].weight is source.weight, bool(module[0].weight.eq(source.weight).all())
    (False, True)
    """
    foreign = {_memory(tensor) for tensor in _tensors(source)}
    copies: dict[int, torch.Tensor] = {}
    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and _memory(tensor) in foreign:
                    table[name] = copies.setdefault(id(tensor), _copy(tensor))
        if isinstance(part, nn.RNNBase):
            part._init_flat_weights()


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            yield from (tensor for tensor in table.values() if tensor is not None)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() else 0


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied
