"""``len(x)`` of a tensor as a size that may be free.

Python's ``len`` must give a plain integer, so that an export fixes the batch of a model that writes
``batch = len(x)``. While a model is exported, ``len`` gives the first size of a tensor in the files that
define its classes. Not all that takes an integer takes such a size (text, keys of a dict, numpy): where an
export fails that has asked for one, it is tried once more with Python's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_TORCH = ("torch", "builtins")


@contextmanager
def lengths_as_sizes(model: nn.Module) -> Iterator[list[Any]]:
    """Within it, ``len`` of a tensor is its first size in the code of ``model``'s classes; gives those that
    are no plain integers, once they were asked for.

    >>> with lengths_as_sizes(nn.ReLU()) as asked:  # PyTorch's own code stays as it is
    ...     "len" in vars(sys.modules["torch.nn.modules.activation"])
    False
    """
    files = [names for names in _files(model) if "len" not in names]
    asked: list[Any] = []
    for names in files:
        names["len"] = _length_into(asked)
    try:
        yield asked
    finally:
        for names in files:
            del names["len"]


def _files(model: nn.Module) -> list[dict[str, Any]]:
    """The global names of each file that defines a class of the model, one each."""
    classes = {base for kind in {type(m) for m in model.modules()} for base in kind.__mro__}
    names = {kind.__module__ for kind in classes if kind.__module__.partition(".")[0] not in _TORCH}
    found = (sys.modules.get(name) for name in sorted(names))
    return [vars(module) for module in found if module is not None]


def _length_into(asked: list[Any]) -> Callable[[Any], Any]:
    def length(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return len(value)
        size: Any = value.shape[0]
        if not isinstance(size, int):
            asked.append(size)
        return size

    return length
