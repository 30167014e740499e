"""Modules that are named are fused where they stand, without a capture."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from backquant.backend_config import BackendConfig, get_fuser_method_mapping
from backquant.backend_config.fusers import ForwardFuser
from backquant.errors import UsageError, did_you_mean
from backquant.graph import get_module, set_module
from backquant.nn.intrinsic.rank import TakesRank, rank_to_fold

Fuse = Callable[[list[nn.Module]], list[nn.Module]]
Names = Sequence[str] | Sequence[Sequence[str]]


def fused_by_name(model: nn.Module, names: Names, inplace: bool, fuse: Fuse) -> nn.Module:
    """A copy of ``model``, or ``model`` itself, in which ``fuse`` has replaced the modules of each list.

    Raises ``UsageError`` for a path that the model lacks.

    >>> model = nn.Sequential(nn.ReLU(), nn.ReLU())
    >>> fused_by_name(model, ["0", "1"], False, lambda found: [found[0], nn.Identity()])[1]
    Identity()
    """
    lists = _as_lists(names)
    for path in (path for paths in lists for path in paths):
        _check(model, path)
    result = model if inplace else copy.deepcopy(model)
    for paths in lists:
        made = fuse([get_module(result, path) for path in paths])
        for path, module in zip(paths, made, strict=True):
            set_module(result, path, module)
    return result


def _as_lists(names: Names) -> list[list[str]]:
    """One list of paths, or several."""
    if names and all(isinstance(name, str) for name in names):
        return [[str(name) for name in names]]
    return [list(paths) for paths in names]


def _check(model: nn.Module, path: Any) -> None:
    known = [name for name, _ in model.named_modules() if name]
    if path not in known:
        raise UsageError(
            f"no module is called {path!r}",
            where="modules_to_fuse",
            fix=did_you_mean(path, known, "paths are those of model.named_modules()"),
        )


def fuser_of_backend(is_qat: bool, backend: BackendConfig, custom: dict[str, Any] | None) -> Fuse:
    """What fuses a list of modules as the entry for their classes says: the fused one, then identities.

    Forward pre-hooks of the first and forward hooks of the last module go to the fused one. ``custom``: as
    ``fuse_custom_config_dict`` of ``fuse_modules``.

    >>> from backquant.backend_config import get_backend_config
    >>> fuse = fuser_of_backend(False, get_backend_config("x86"), None)
    >>> [type(module).__name__ for module in fuse([nn.Linear(2, 2).eval(), nn.ReLU().eval()])]
    ['LinearReLU', 'Identity']
    """
    additional = (custom or {}).get("additional_fuser_method_mapping", {})

    def fuse(modules: list[nn.Module]) -> list[nn.Module]:
        kinds = tuple(type(module) for module in modules)
        fuser = additional.get(kinds) or _fuser_of(backend, kinds)
        hooks = _taken_hooks(modules)  # before a fuser copies the modules, and them
        fused = fuser(is_qat, *modules)
        rank = None if is_qat else rank_to_fold(*modules[:2])
        if rank is not None:
            fused.register_forward_pre_hook(TakesRank(rank))
        for hook in hooks[0]:
            fused.register_forward_pre_hook(hook)
        for hook in hooks[1]:
            fused.register_forward_hook(hook)
        rest = (nn.Identity().train(modules[0].training) for _ in modules[1:])
        return [fused, *rest]

    return fuse


def _fuser_of(backend: BackendConfig, kinds: tuple[type, ...]) -> Callable[..., nn.Module]:
    pattern: Any = kinds[0] if kinds else None
    for kind in kinds[1:]:
        pattern = (kind, pattern)
    fuser = get_fuser_method_mapping(backend).get(pattern) if len(kinds) > 1 else None
    if fuser is None:
        raise UsageError(
            f"{backend.name} fuses no {', '.join(kind.__name__ for kind in kinds) or 'empty list'}",
            where="modules_to_fuse",
            fix='fuse_custom_config_dict={"additional_fuser_method_mapping": {(...): fuser}}, where '
            "fuser(is_qat, *modules) returns a module",
        )
    return ForwardFuser(fuser)


def _taken_hooks(modules: list[nn.Module]) -> tuple[list[Any], list[Any]]:
    """The forward pre-hooks of the first and the forward hooks of the last module, which lose them."""
    before, after = modules[0]._forward_pre_hooks, modules[-1]._forward_hooks
    taken = [*before.values()], [*after.values()]
    before.clear()
    after.clear()
    return taken
