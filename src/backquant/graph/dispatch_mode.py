"""Dispatch modes that PyTorch's compiler costs nothing, and that do it no harm.

1. ``TorchDispatchMode`` keeps the compiler out of ``__torch_dispatch__`` by a wrapper that imports it
   (Dynamo, sympy: 65 MiB and more than a second) with the first operator. Where nothing has imported it by
   then, there is nothing to keep out.
2. Under a mode the compiler by default compiles nothing, and remembers for the rest of the process that it
   does not compile that code. ``torch.cond``, ``flex_attention`` and their like, compiled whenever they are
   called, would fail ever after, under no mode, too. So these modes are off while something is compiled, and
   on again while it runs; ``torch.cond`` and its like come to them as one operator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DispatchMode"]


class DispatchMode(TorchDispatchMode):
    """``TorchDispatchMode``, which imports no compiler and lets it compile.

    ``func`` of ``__torch_dispatch__`` may be a ``HigherOrderOperator``, which has no schema.

    >>> class Names(DispatchMode):
    ...     def __torch_dispatch__(self, func, types, args=(), kwargs=None):
    ...         print(func)
    ...         return func(*args, **(kwargs or {}))
    >>> import torch
    >>> with Names():
    ...     _ = torch.relu(torch.ones(1))
    aten.ones.default
    aten.relu.default
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether the compiler may compile while this mode is on: case 2 of the module."""
        return True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        plain = vars(cls).get("__torch_dispatch__")
        super().__init_subclass__(**kwargs)  # puts PyTorch's wrapper around it
        if plain is not None:
            wrapped = vars(cls)["__torch_dispatch__"]
            cls.__torch_dispatch__ = _either(plain, wrapped)  # type: ignore[method-assign]


def _either(plain: Callable[..., Any], wrapped: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        chosen = wrapped if "torch._dynamo" in sys.modules else plain
        return chosen(*args, **kwargs)

    return dispatch
