"""PyTorch's decisions and models, backend by backend, and the settings that make both comparable."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.ao.quantization as tq
import torch.ao.quantization.quantize_fx as torch_fx  # the backend configs need it imported first
from torch import fx, nn
from torch.ao.quantization.observer import MinMaxObserver as TorchMinMax

import backquant.qconfig as bq
from against_torch.torch_side import TORCH_BACKENDS, min_max, quietly
from backquant.backend_config import BackendConfig, get_backend_config
from backquant.observe import MinMaxObserver
from unkept import beside_numbers

__all__ = [
    "BACKENDS",
    "Backend",
    "Oracle",
    "pattern_key",
    "torch_decides",
    "torch_matches",
    "torch_prepares",
]


@dataclass(frozen=True)
class Backend:
    """One backend in both libraries, with min/max observers in place of histograms."""

    name: str
    get_torch: Any
    engine: str

    @property
    def ours(self) -> BackendConfig:
        return get_backend_config(self.name)

    @property
    def theirs(self) -> Any:
        return beside_numbers(self.get_torch())

    def mapping(self) -> bq.QConfigMapping:
        return min_max(bq.get_default_qconfig_mapping(self.engine), bq.QConfig, MinMaxObserver)

    def torch_mapping(self) -> Any:
        return min_max(tq.get_default_qconfig_mapping(self.engine), tq.QConfig, TorchMinMax)

    def torch_prepare(self, model: nn.Module, example: torch.Tensor) -> fx.GraphModule:
        """PyTorch's prepared model; ``model`` is copied."""
        with quietly():
            return torch_fx.prepare_fx(
                copy.deepcopy(model), self.torch_mapping(), (example,), backend_config=self.theirs
            )

    def torch_reference(self, prepared: fx.GraphModule) -> fx.GraphModule:
        """PyTorch's reference model on plain tensors; ``prepared`` is copied."""
        with quietly():
            return torch_fx._convert_to_reference_decomposed_fx(
                copy.deepcopy(prepared), backend_config=self.theirs
            )

    def torch_lowered(self, prepared: fx.GraphModule) -> fx.GraphModule:
        """PyTorch's lowered model; run it under ``running``. ``prepared`` is copied."""
        with quietly(), self.running():
            return torch_fx.convert_fx(copy.deepcopy(prepared), backend_config=self.theirs)

    @contextmanager
    def running(self) -> Iterator[None]:
        """PyTorch's engine is a process-wide setting."""
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = self.engine
        try:
            yield
        finally:
            torch.backends.quantized.engine = before


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("native", TORCH_BACKENDS["native"], "fbgemm"),
        *(
            Backend(name, TORCH_BACKENDS[name], name)
            for name in ("fbgemm", "qnnpack", "x86", "onednn")
        ),
    )
}


@dataclass
class Oracle:
    """What PyTorch decides. Patterns are written with ``backquant.nn`` for ``torch.ao.nn``."""

    captured_names: list[str] = field(default_factory=list)
    fused_names: list[str] = field(default_factory=list)
    fused_types: dict[str, str] = field(default_factory=dict)
    matches: dict[str, tuple[str, str]] = field(default_factory=dict)  # node: anchor, pattern
    observed: set[str] = field(default_factory=set)
    qconfigs: dict[str, Any] = field(default_factory=dict)
    scopes: dict[str, Any] = field(default_factory=dict)


def pattern_key(pattern: Any) -> str:
    """A pattern as text in which PyTorch's module classes and ours of the same name are equal."""
    if isinstance(pattern, tuple):
        return "(" + ", ".join(map(pattern_key, pattern)) + ")"
    if isinstance(pattern, type):
        module = pattern.__module__.replace("torch.ao.nn", "backquant.nn")
        package = module.partition(".modules")[0].replace("torch.nn", "nn")
        for part in ("qat.dynamic", "intrinsic.qat", "qat", "intrinsic", "quantized.reference"):
            if f".nn.{part}" in f".{package}":
                return f"{part}.{pattern.__name__}"
        return pattern.__name__
    return pattern if isinstance(pattern, str) else f"{pattern!r}".partition(" at 0x")[0]


def torch_decides(
    model: nn.Module, inputs: tuple[Any, ...], mapping: Any, backend: Any, is_qat: bool = False
) -> Oracle:
    """PyTorch's capture, fusion, matches and observed nodes."""
    found = torch_matches(model, backend, is_qat)
    attributes = torch_prepares(model, inputs, mapping, backend, is_qat)
    found.observed = set(attributes.observed_node_names)
    found.qconfigs = dict(attributes.node_name_to_qconfig)
    return found


def torch_matches(model: nn.Module, backend: Any, is_qat: bool = False) -> Oracle:
    """PyTorch's capture, fusion and matches."""
    from torch.ao.quantization.fx import match_utils, pattern_utils, quantize_handler, tracer
    from torch.ao.quantization.fx.fuse import fuse

    found = Oracle()
    own = copy.deepcopy(model)
    trace = tracer.QuantizationTracer([], [])
    captured = torch.fx.GraphModule(own, trace.trace(own))
    found.captured_names = [node.name for node in captured.graph.nodes]
    found.scopes = dict(trace.node_name_to_scope)
    fused = fuse(captured, is_qat, None, backend)
    modules = dict(fused.named_modules(remove_duplicate=False))
    found.fused_names = [node.name for node in fused.graph.nodes]
    found.fused_types = {
        node.name: pattern_key(type(modules[node.target]))
        for node in fused.graph.nodes
        if node.op == "call_module"
    }
    handlers = pattern_utils._sorted_patterns_dict(
        quantize_handler._get_pattern_to_quantize_handlers(backend)
    )
    getters = {
        pattern: config._root_node_getter
        for pattern, config in backend._pattern_complex_format_to_config.items()
        if config._root_node_getter is not None
    }
    matches = match_utils._find_matches(fused.graph, modules, handlers, getters, [], [], [])
    found.matches = {
        name: (match[0].name, pattern_key(match[2])) for name, match in matches.items()
    }
    return found


def torch_prepares(
    model: nn.Module, inputs: tuple[Any, ...], mapping: Any, backend: Any, is_qat: bool = False
) -> Any:
    """What PyTorch remembers of prepare: observed names, the QConfig of each node."""
    prepare = torch_fx.prepare_qat_fx if is_qat else torch_fx.prepare_fx
    with quietly():
        prepared = prepare(copy.deepcopy(model), mapping, inputs, backend_config=backend)
    return prepared.meta["_observed_graph_module_attrs"]
