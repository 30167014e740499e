"""Eager mode: the kernels of one layer, and modules that quantize at each call."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from backquant.backend_config import BackendConfig
from backquant.convert import convert_to_reference
from backquant.errors import UsageError, did_you_mean
from backquant.graph import get_module, set_module
from backquant.lower.kernels.configured import KernelModule
from backquant.match import Plan, Reason
from backquant.nn.quantized.scaled import Scaled
from backquant.pipeline.capture import Capturing
from backquant.pipeline.lower import quantized_model
from backquant.pipeline.plan import planned
from backquant.pipeline.prepare import prepared_for_inference
from backquant.prepare import Request
from backquant.qconfig import (
    QConfig,
    QConfigMapping,
    default_dynamic_qconfig,
    float16_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
    float_qparams_weight_only_qconfig_4bit,
)

# Kernels for single modules, each lowered by itself: the model around them need not be captured.


class KernelsAlone(NamedTuple):
    """``kernels``: the kernels by path. ``plan``, ``left_in_float``: why other modules have none.
    ``modules``: the module at each path, kernel or not. ``shown``: what stands for each kernel, with its
    weight and scales to read."""

    kernels: dict[str, KernelModule]
    plan: Plan
    left_in_float: tuple[Reason, ...] = ()
    modules: Mapping[str, nn.Module] = MappingProxyType({})
    shown: Mapping[str, nn.Module] = MappingProxyType({})


def kernels_alone(
    model: nn.Module, requested: Mapping[str, QConfig], backend: BackendConfig
) -> KernelsAlone:
    """The kernels of the modules of ``model`` at these paths, which need no data, with their QConfigs.

    Raises ``EngineError`` when this build or CPU lacks the backend's engine.

    >>> from backquant.backend_config import get_backend_config
    >>> from backquant.qconfig import default_dynamic_qconfig
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Softplus()).eval()
    >>> requested = {"0": default_dynamic_qconfig, "1": default_dynamic_qconfig}
    >>> list(kernels_alone(model, requested, get_backend_config("fbgemm")).kernels)
    ['0']
    """
    if not requested:
        return KernelsAlone({}, Plan(backend.name))
    mapping = QConfigMapping()
    calls, root = fx.Graph(), nn.Module()
    names = {path: f"at_{number}" for number, path in enumerate(requested)}
    results = []
    for path, name in names.items():
        set_module(root, name, get_module(model, path))
        mapping.set_module_name(name, requested[path])
        results.append(calls.call_module(name, (calls.placeholder(f"x_{name}"),)))
    calls.output(tuple(results))
    one_graph = fx.GraphModule(root, calls).eval()
    request = Request(backend, mapping)
    step = planned(one_graph, request, Capturing("trace"))
    reference = convert_to_reference(prepared_for_inference(step, request))
    lowered = quantized_model(reference, one_graph)
    runs = lowered.graph_module
    modules = {path: runs.get_submodule(name) for path, name in names.items()}
    kernels = {path: found for path, found in modules.items() if isinstance(found, KernelModule)}
    shown = {path: lowered.get_submodule(names[path]) for path in kernels}
    return KernelsAlone(kernels, lowered.plan, lowered.left_in_float, modules, shown)


# Modules that are replaced by kernels where they stand, in a model that is not captured.


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
