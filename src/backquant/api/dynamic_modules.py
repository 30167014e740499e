"""``quantize_dynamic``: modules are replaced where they stand, so that no model has to be captured."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from backquant.api.arguments import given_backend, given_model
from backquant.api.skipped import warn_of_skipped
from backquant.backend_config import BackendConfig
from backquant.errors import UsageError, did_you_mean
from backquant.graph import get_module
from backquant.lower.kernels.configured import KernelModule
from backquant.pipeline.kernels_alone import kernels_alone
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


def quantize_dynamic(  # size: PyTorch's signature, and the backend
    model: nn.Module,
    qconfig_spec: Iterable[type | str] | Mapping[type | str, QConfig | None] | None = None,
    dtype: torch.dtype = torch.qint8,
    mapping: None = None,
    inplace: bool = False,
    *,
    backend_config: BackendConfig | dict[str, Any] | None = None,
) -> nn.Module:
    """A copy of ``model`` whose linear and recurrent layers (or embeddings) run on integer kernels.

    Weights are quantized now, activations at each call; no data is needed. The model is not captured:
    whatever its ``forward`` does, ``model.encoder.fc`` is replaced by a kernel that is called like it. Layers
    without a kernel stay float; one warning lists them with the reasons. ``backquant.quantize`` with
    ``default_dynamic_qconfig`` does the same to a captured model, with a report.

    The result is for inference, and is saved by its ``state_dict``: make the same model again with
    ``quantize_dynamic`` and load it.

    Args:
        model: any module.
        qconfig_spec: a set of classes and paths of modules, or a dict from these to QConfigs (``None``: leave
            it in float). The QConfig of a module holds for its submodules, unless they are named themselves.
            Default: the layers that ``dtype`` is for.
        dtype: of the weights, unless QConfigs are given: ``torch.qint8`` or ``torch.float16`` for linear
            and recurrent layers, ``torch.quint8`` or ``torch.quint4x2`` for embeddings.
        mapping: must be ``None``: the backend says what becomes of a module.
        inplace: replace the modules of ``model`` itself, and return it.
        backend_config: the backend whose kernels are used. Default: native.

    Raises:
        UsageError: another dtype, a path or class that the model lacks, a ``mapping``.
        EngineError: this build or CPU lacks the backend's engine.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    >>> quantized = quantize_dynamic(model, {nn.Linear})
    >>> type(quantized[0]).__name__, type(model[0]).__name__, quantized(torch.ones(2, 4)).shape
    ('DynamicLinear', 'Linear', torch.Size([2, 4]))
    """
    if mapping is not None:
        raise UsageError(
            "quantize_dynamic takes no table of modules: the backend says what each becomes",
            where="mapping",
            fix="leave it out; BackendPatternConfig(...).set_reference_quantized_module(...)",
        )
    requested = _requested_by_path(given_model(model), _spec(qconfig_spec, dtype))
    alone = kernels_alone(model, requested, given_backend(backend_config))
    warn_of_skipped(alone.plan, *map(str, alone.left_in_float))
    kernels = alone.kernels
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


def _requested_by_path(
    model: nn.Module, spec: Mapping[type | str, QConfig | None]
) -> dict[str, QConfig]:
    """The QConfig of each module that can be replaced: its own, its class's, or that of what it is in."""
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
            isinstance(inner, KernelModule) for inner in module.modules()
        ):
            yield module
