"""``len(x)`` of a tensor as a size that may be free.

Python's ``len`` must give a plain integer, so that an export fixes the batch of a model that writes
``batch = len(x)``. While a model is exported, ``len`` gives the first size of a tensor in the files that
define its classes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_TORCH = ("torch", "builtins")


@contextmanager
def lengths_as_sizes(model: nn.Module) -> Iterator[None]:
    """Within it, ``len`` of a tensor is its first size in the code of ``model``'s classes.

    >>> with lengths_as_sizes(nn.ReLU()):  # PyTorch's own code stays as it is
    ...     "len" in vars(sys.modules["torch.nn.modules.activation"])
    False
    """
    files = [names for names in _files(model) if "len" not in names]
    for names in files:
        names["len"] = _length
    try:
        yield
    finally:
        for names in files:
            del names["len"]


def _files(model: nn.Module) -> list[dict[str, Any]]:
    """The global names of each file that defines a class of the model, one each."""
    classes = {base for kind in {type(m) for m in model.modules()} for base in kind.__mro__}
    names = {kind.__module__ for kind in classes if kind.__module__.partition(".")[0] not in _TORCH}
    found = (sys.modules.get(name) for name in sorted(names))
    return [vars(module) for module in found if module is not None]


def _length(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim():
        return value.shape[0]
    return len(value)
