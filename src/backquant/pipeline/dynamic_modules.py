"""Modules that are replaced by kernels where they stand, in a model that is not captured."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from backquant.errors import UsageError, did_you_mean
from backquant.graph import get_module
from backquant.nn.quantized.scaled import Scaled
from backquant.qconfig import (
    QConfig,
    default_dynamic_qconfig,
    float16_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
    float_qparams_weight_only_qconfig_4bit,
)

_RECURRENT = (nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_KINDS = (nn.Linear, *_RECURRENT, *_TABLES)
_DEFAULTS: dict[torch.dtype, tuple[QConfig, tuple[type[nn.Module], ...]]] = {
    torch.qint8: (default_dynamic_qconfig, (nn.Linear, *_RECURRENT)),
    torch.float16: (float16_dynamic_qconfig, (nn.Linear, *_RECURRENT)),
    torch.quint8: (float_qparams_weight_only_qconfig, _TABLES),
    torch.quint4x2: (float_qparams_weight_only_qconfig_4bit, (nn.EmbeddingBag,)),
}


def requested_by_path(model: nn.Module, given: Any, dtype: torch.dtype) -> dict[str, QConfig]:
    """The QConfig of each module that can be replaced: its own, its class's, or that of what it is in.

    ``given``, ``dtype``: as in ``quantize_dynamic``. Raises ``UsageError`` as that does.

    >>> list(requested_by_path(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), None, torch.qint8))
    ['0']
    """
    spec = _spec(given, dtype)
    modules = dict(model.named_modules())
    known = {*modules, *(type(module) for module in modules.values())}
    paths = [path for path in modules if path]
    for key in spec:
        if isinstance(key, str) and key not in known:
            raise UsageError(
                f"no module is called {key!r}",
                where="qconfig_spec",
                fix=did_you_mean(key, paths, "paths are those of model.named_modules()"),
            )
    found: dict[str, QConfig | None] = {}
    for path, module in modules.items():
        inherited = found.get(path.rpartition(".")[0]) if path else None
        own = getattr(module, "qconfig", None) or inherited
        found[path] = spec.get(path, spec.get(type(module), own))
    return {
        path: qconfig
        for path, qconfig in found.items()
        if qconfig is not None and type(modules[path]) in _KINDS
    }


def with_kernels(model: nn.Module, kernels: Mapping[str, nn.Module], *, inplace: bool) -> nn.Module:
    """A copy of ``model``, or ``model`` itself, with these kernels in the place of its modules, by path.

    >>> with_kernels(nn.Sequential(nn.ReLU()), {}, inplace=False)
    Sequential(
      (0): ReLU()
    )
    """
    result = model if inplace else copy.deepcopy(model)
    if "" in kernels:
        return kernels[""]
    by_module = {id(get_module(result, path)): kernel for path, kernel in kernels.items()}
    for parent in list(result.modules()):
        for name, child in parent._modules.items():
            if id(child) in by_module:
                parent._modules[name] = by_module[id(child)]
    _without_float_paths(result)
    return result


def _spec(given: Any, dtype: torch.dtype) -> dict[type | str, QConfig | None]:
    if isinstance(given, Mapping):
        return dict(given)
    if dtype not in _DEFAULTS:
        raise UsageError(
            f"no weights of {dtype} are known",
            where="dtype",
            fix=" or ".join(f"dtype={known}" for known in _DEFAULTS),
        )
    qconfig, kinds = _DEFAULTS[dtype]
    return dict.fromkeys(kinds if given is None else given, qconfig)


def _without_float_paths(model: nn.Module) -> None:
    """Layers of ``nn.TransformerEncoder`` read the weights of their linear layers: not any more."""
    for module in _transformers(model):
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        else:
            module.use_nested_tensor = False


def _transformers(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)) and any(
            isinstance(inner, Scaled) for inner in module.modules()
        ):
            yield module
