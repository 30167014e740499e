"""Calls inside of an export that leave out what a call of the model leaves out.

Models ask whether they are exported, and make a mask then that a call does without. Where the layers that
get it do not take it (the mask has other sizes than they ask for), the export fails, or gives a graph that
does: such a model works without the mask only, and is exported without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Calls:
    """The arguments of the calls of one run that were ``None``, by module, in order."""

    def __init__(self) -> None:
        self._none: dict[nn.Module, list[Arguments]] = {}
        self._next: dict[nn.Module, int] = {}

    def begin(self, *_: Any) -> None:
        self._next.clear()

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = tuple(arg is None for arg in args), {k: v is None for k, v in kwargs.items()}
        self._none.setdefault(module, []).append(given)

    def restore(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """``args`` and ``kwargs`` with ``None`` where the same call of the run had it."""
        place = self._next[module] = self._next.get(module, -1) + 1
        seen = self._none.get(module, [])
        if place >= len(seen):
            return args, kwargs
        by_place, by_name = seen[place]
        left_out = (*by_place, *(False for _ in args[len(by_place) :]))
        kept = tuple(None if none else arg for arg, none in zip(args, left_out, strict=False))
        return kept, {k: None if by_name.get(k) else v for k, v in kwargs.items()}


@contextmanager
def as_called(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Within the block, submodules of ``model`` get ``None`` where a call with these arguments gives it them.

    ``model`` is run once. It must be a copy that nobody else uses.

    >>> class Masking(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.inner, self.exported = Adding(), False
    ...     def forward(self, x):
    ...         return self.inner(x, torch.ones(7) if self.exported else None)
    >>> class Adding(nn.Module):
    ...     def forward(self, x, mask):
    ...         return x if mask is None else x + mask
    >>> model = Masking()
    >>> with as_called(model, (torch.zeros(2),), {}):
    ...     model.exported = True
    ...     model(torch.zeros(2))
    tensor([0., 0.])
    """
    calls, modules = _Calls(), [module for path, module in model.named_modules() if path]
    copied = pytree.tree_map(lambda leaf: leaf, (args, kwargs))
    with ExitStack() as hooks, torch.no_grad():
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(calls.note, with_kwargs=True).remove)
        model(*copied[0], **copied[1])
    with ExitStack() as hooks:
        hooks.callback(model.register_forward_pre_hook(calls.begin).remove)
        for module in modules:
            handle = module.register_forward_pre_hook(calls.restore, with_kwargs=True)
            hooks.callback(handle.remove)
        yield
