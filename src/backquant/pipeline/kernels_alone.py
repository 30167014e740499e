"""Kernels for single modules, each lowered by itself: the model around them need not be captured."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import fx, nn

from backquant.backend_config import BackendConfig
from backquant.convert import convert_to_reference
from backquant.graph import get_module, set_module
from backquant.lower.kernels.configured import KernelModule
from backquant.match import Plan, Reason
from backquant.pipeline.capture import Capturing
from backquant.pipeline.lower import quantized_model
from backquant.pipeline.plan import planned
from backquant.pipeline.prepare import prepared_for_inference
from backquant.prepare import Request
from backquant.qconfig import QConfig, QConfigMapping


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
