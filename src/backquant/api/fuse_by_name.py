"""``fuse_modules``: modules that are named are fused where they stand, without a capture."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from backquant.api.arguments import given_backend, given_model
from backquant.backend_config import BackendConfig, get_fuser_method_mapping
from backquant.backend_config.fusers import ForwardFuser
from backquant.errors import UsageError, did_you_mean
from backquant.graph import get_module, set_module
from backquant.nn.intrinsic.rank import TakesRank, rank_to_fold

Fuse = Callable[[list[nn.Module]], list[nn.Module]]
Names = Sequence[str] | Sequence[Sequence[str]]


def fuse_modules(  # size: PyTorch's signature, and the backend
    model: nn.Module,
    modules_to_fuse: Names,
    inplace: bool = False,
    fuser_func: Fuse | None = None,
    fuse_custom_config_dict: dict[str, Any] | None = None,
    *,
    backend_config: BackendConfig | dict[str, Any] | None = None,
) -> nn.Module:
    """A copy of ``model`` in which the listed sequences of modules are fused, for inference.

    Of each list of names the first becomes the fused module (batch norms are folded into it), the others
    ``nn.Identity``. ``prepare_fx`` needs no such list: it fuses what the backend fuses. Forward pre-hooks of
    the first and forward hooks of the last module of a list go to the fused one.

    Args:
        model: any module, in evaluation mode where batch norms are to be folded.
        modules_to_fuse: one list of paths, or a list of such lists: ``[["conv", "bn", "relu"]]``.
        inplace: fuse the modules of ``model`` itself, and return it.
        fuser_func: takes a list of modules, returns as many. Default: the fuser of the backend's pattern.
        fuse_custom_config_dict: ``{"additional_fuser_method_mapping": {classes: fuser}}``, where a fuser is
            ``f(is_qat, *modules)``.
        backend_config: whose patterns. Default: native.

    Raises:
        UsageError: a path that the model lacks; classes for which there is no fuser.
        ConfigError: the modules are in training mode, or in different modes.

    >>> model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()).eval()
    >>> [type(module).__name__ for module in fuse_modules(model, ["0", "1", "2"])]
    ['ConvReLU2d', 'Identity', 'Identity']
    """
    fuse = fuser_func or _by_backend(False, backend_config, fuse_custom_config_dict)
    return _fused(model, modules_to_fuse, inplace, fuse)


def fuse_modules_qat(  # size: PyTorch's signature, and the backend
    model: nn.Module,
    modules_to_fuse: Names,
    inplace: bool = False,
    fuser_func: Fuse | None = None,
    fuse_custom_config_dict: dict[str, Any] | None = None,
    *,
    backend_config: BackendConfig | dict[str, Any] | None = None,
) -> nn.Module:
    """A copy of ``model`` in which the listed sequences of modules are fused, for training.

    As ``fuse_modules``; batch norms stay, in the fused modules that ``prepare_qat_fx`` trains.

    >>> model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    >>> type(fuse_modules_qat(model, ["0", "1", "2"])[0]).__name__
    'ConvBnReLU2d'
    """
    fuse = fuser_func or _by_backend(True, backend_config, fuse_custom_config_dict)
    return _fused(model, modules_to_fuse, inplace, fuse)


def _fused(model: nn.Module, names: Names, inplace: bool, fuse: Fuse) -> nn.Module:
    given_model(model)
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


def _by_backend(
    is_qat: bool, backend_config: Any, custom: dict[str, Any] | None
) -> Callable[[list[nn.Module]], list[nn.Module]]:
    """The fuser of the pattern that the modules' classes are, then the bookkeeping around it."""
    backend = given_backend(backend_config)
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
