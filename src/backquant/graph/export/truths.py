"""Comparisons of sizes as plain truths, for functions that take nothing else."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from backquant.graph.user_code import is_users

__all__ = ["plain_comparisons", "wants_plain_truth"]

_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")


def wants_plain_truth(error: BaseException) -> bool:
    """Whether an export failed since a function took the comparison of a size for no ``bool``.

    >>> wants_plain_truth(TypeError("f(): argument 'is_causal' must be bool, not SymBool"))
    True
    """
    return isinstance(error, TypeError) and "must be bool, not SymBool" in str(error)


@contextmanager
def plain_comparisons() -> Iterator[None]:
    """In this thread, comparisons of dynamic sizes in code that is not PyTorch's give ``True`` or ``False``.

    In an export ``x.shape[1] > 1`` is a ``SymBool``, which ``F.scaled_dot_product_attention(is_causal=...)``
    refuses. What it was for the example inputs then holds for all: the program asks for such sizes, as after
    an ``if``. Comparisons that the values of tensors decide stay as they are.

    >>> with plain_comparisons():
    ...     torch.zeros(3).shape[0] > 1
    True
    """
    thread = threading.get_ident()
    originals = {name: getattr(torch.SymInt, name) for name in _COMPARISONS}
    try:
        for name, original in originals.items():
            setattr(torch.SymInt, name, _plain(original, thread))
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.SymInt, name, original)


def _plain(original: Callable[[Any, Any], Any], thread: int) -> Callable[[Any, Any], Any]:
    # imported here: it loads the compiler, which loading a model does not need
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

    @functools.wraps(original)
    def compared(one: Any, other: Any) -> Any:
        found = original(one, other)
        if not isinstance(found, torch.SymBool) or threading.get_ident() != thread:
            return found
        if not is_users(sys._getframe(1).f_code.co_filename) or has_free_unbacked_symbols(found):
            return found
        return bool(found)

    return compared
