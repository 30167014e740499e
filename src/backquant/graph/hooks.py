"""Hooks on the calls of modules, as parts of the graph.

A trace runs the hooks of the modules that it goes through. A module that is one operator would keep its hooks
only until it becomes another one (fused, quantized); so a trace runs them, too, around the call, and the
graph's copy of the module has none. Hooks of PyTorch that compute a weight, and checks of our own
(``KeptHook``), change no values between modules and stay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

_OF_MODULES = frozenset(vars(nn.Module()))
_TABLES = ("_forward_pre_hooks", "_forward_hooks")
# Of the names of what hooks compute a weight from.
_ENDINGS = ("_g", "_v", "_u", "_orig", "_mask")


class KeptHook:
    """A hook that stays with its module, and is no part of the graph."""


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs hooks that may change what goes in or comes out.

    >>> linear = nn.Linear(2, 2)
    >>> handle = linear.register_forward_hook(lambda module, args, output: output * 2)
    >>> has_hooks(linear), has_hooks(nn.Linear(2, 2))
    (True, False)
    """
    if isinstance(module, torch.jit.ScriptModule):  # it stays as it is
        return False
    return any(_is_users(hook) for table in _TABLES for hook in getattr(module, table).values())


def _is_users(hook: Any) -> bool:
    return not isinstance(hook, KeptHook) and not _computes_weight(hook)


# The calls that remove hooks of PyTorch that compute a weight, which keeps its value.
_REMOVALS: dict[type, str] = {
    WeightNorm: "torch.nn.utils.remove_weight_norm",
    SpectralNorm: "torch.nn.utils.remove_spectral_norm",
    BasePruningMethod: "torch.nn.utils.prune.remove",
}


def _computes_weight(hook: Any) -> bool:
    return isinstance(hook, tuple(_REMOVALS))


def removal_of(hook: Any) -> str:
    """The call that makes a computed weight a parameter; of hooks of the user's own their handle's.

    >>> linear = nn.utils.spectral_norm(nn.Linear(2, 2))
    >>> [removal_of(hook) for hook in linear._forward_pre_hooks.values()]
    ["torch.nn.utils.remove_spectral_norm(module, 'weight')"]
    """
    calls = (call for kind, call in _REMOVALS.items() if isinstance(hook, kind))
    call = next(calls, None)
    name = getattr(
        hook, "_tensor_name" if isinstance(hook, BasePruningMethod) else "name", "weight"
    )
    return "handle.remove()" if call is None else f"{call}(module, {name!r})"


def has_own_methods(module: nn.Module) -> bool:
    """Whether methods were assigned to ``module`` itself (``forward``, say): it does not what its class does.

    >>> linear = nn.Linear(2, 2)
    >>> linear.forward = lambda x: x
    >>> has_own_methods(linear), has_own_methods(nn.Linear(2, 2))
    (True, False)
    """
    kind, held = type(module), vars(module)
    own = [name for name in held.keys() - _OF_MODULES if callable(held[name])]
    return any(callable(getattr(kind, name, None)) for name in own if not name.startswith("__"))


def drop_hooks(copied: nn.Module) -> None:
    """Take from ``copied``, a module of a shallow copy, the hooks that a trace has run."""
    for table in _TABLES:
        kept = OrderedDict((k, h) for k, h in getattr(copied, table).items() if not _is_users(h))
        setattr(copied, table, kept)


@contextmanager
def only_users_hooks(module: nn.Module) -> Iterator[None]:
    """While it is open, ``module``, of a shallow copy, has no hooks but those of ``has_hooks``."""
    held = {table: getattr(module, table) for table in _TABLES}
    for table, hooks in held.items():
        setattr(module, table, OrderedDict((k, h) for k, h in hooks.items() if _is_users(h)))
    try:
        yield
    finally:
        for table, hooks in held.items():
            setattr(module, table, hooks)


@contextmanager
def forward_in_place(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """While it is open, a call of ``module`` is one of ``forward`` between the hooks."""
    held = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if held is not None:
            module.__dict__["forward"] = held


def with_hooks(kind: type[nn.Module]) -> Callable[..., Any]:
    """The ``forward`` of ``kind`` with the hooks of the module around it.

    >>> relu = nn.ReLU()
    >>> handle = relu.register_forward_hook(lambda module, args, output: output + 1)
    >>> with_hooks(nn.ReLU)(relu, torch.zeros(1))
    tensor([1.])
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with forward_in_place(self, MethodType(kind.forward, self)):
            return nn.Module._call_impl(self, *args, **kwargs)

    return forward


def weight_hooks(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """Hooks of PyTorch that compute a weight before each call of ``module``, by the name of the weight:
    ``nn.utils.weight_norm``, ``nn.utils.spectral_norm`` and ``nn.utils.prune``.

    >>> list(weight_hooks(nn.utils.spectral_norm(nn.Linear(2, 2))))
    ['weight']
    """
    if isinstance(module, torch.jit.ScriptModule):
        return {}
    hooks: Any = filter(_computes_weight, module._forward_pre_hooks.values())
    return {getattr(hook, "name", "") or hook._tensor_name: hook for hook in hooks}


def hold_computed_weights(copied: nn.Module) -> None:
    """Let ``copied``, a module of a shallow copy in evaluation mode, hold the weights that its hooks compute.

    >>> linear = nn.utils.spectral_norm(nn.Linear(2, 2)).eval()
    >>> hold_computed_weights(linear)
    >>> [name for name, _ in linear.named_parameters()], weight_hooks(linear)
    (['bias', 'weight'], {})
    """
    found = weight_hooks(copied)
    if not found:
        return
    for name, hook in found.items():
        hook(copied, ())
        value = getattr(copied, name).detach()
        for ending in _ENDINGS:
            copied._parameters.pop(name + ending, None)
            copied._buffers.pop(name + ending, None)
        delattr(copied, name)
        setattr(copied, name, nn.Parameter(value))
    hooks = copied._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if _computes_weight(hook)]:
        del hooks[key]
