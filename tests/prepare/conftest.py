"""Our steps up to a prepared model, and PyTorch's as the oracle, for x86 with min/max observers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.ao.quantization as tq
from torch import fx, nn
from torch.ao.quantization.backend_config.x86 import get_x86_backend_config as torch_x86
from torch.ao.quantization.observer import MinMaxObserver as TorchMinMax
from torch.ao.quantization.quantize_fx import _convert_to_reference_decomposed_fx, prepare_fx

import backquant.observe as bo
import backquant.qconfig as bq
from against_torch.torch_side import min_max
from backquant.backend_config import get_x86_backend_config
from backquant.calibrate import calibrate
from backquant.convert import convert_to_reference
from backquant.fuse import apply_fusion
from backquant.graph import capture
from backquant.match import make_plan, plan_fusion
from backquant.prepare import PreparedModule, Record, insert_observers
from unkept import beside_numbers


class Flow:
    def mapping(self) -> bq.QConfigMapping:
        mapping = bq.get_default_qconfig_mapping("x86")
        return min_max(mapping, bq.QConfig, bo.MinMaxObserver)

    def torch_mapping(self) -> Any:
        return min_max(tq.get_default_qconfig_mapping("x86"), tq.QConfig, TorchMinMax)

    def prepare(
        self, model: nn.Module, mapping: Any = None, backend: Any = None, custom: Any = None
    ) -> PreparedModule:
        backend, mapping = backend or get_x86_backend_config(), mapping or self.mapping()
        captured = capture(model)
        fusions = plan_fusion(captured.module, backend)
        fused = apply_fusion(captured.module, captured.scopes, fusions, backend, False)
        planned = make_plan(fused.module, fused.scopes, backend, mapping, fusions=fusions)
        return insert_observers(
            fused.module,
            Record(
                planned, backend, mapping, custom, scopes=fused.scopes, provenance=fused.provenance
            ),
        )

    def torch_prepare(self, model: nn.Module, *example: Any, mapping: Any = None) -> fx.GraphModule:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mapping = mapping or self.torch_mapping()
            return prepare_fx(model, mapping, example, backend_config=beside_numbers(torch_x86()))

    def ours(self, model: nn.Module, *batches: torch.Tensor) -> fx.GraphModule:
        """Our reference model, calibrated on the batches."""
        prepared = self.prepare(model)
        calibrate(prepared, batches)
        return convert_to_reference(prepared)

    def theirs(self, model: nn.Module, *batches: torch.Tensor) -> fx.GraphModule:
        """PyTorch's reference model."""
        prepared = self.torch_prepare(model, batches[0])
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for batch in batches:
                prepared(batch)
            return _convert_to_reference_decomposed_fx(
                prepared, backend_config=beside_numbers(torch_x86())
            )

    def observers(self, prepared: fx.GraphModule) -> list[tuple[str, str, str]]:
        """(observer, the first that it shares its instance with, its class), in graph order."""
        names = [str(n.target) for n in prepared.graph.nodes if n.op == "call_module"]
        names = [name for name in names if name.startswith("activation_post_process")]
        modules = [(name, getattr(prepared, name)) for name in names]
        first: dict[int, str] = {}
        return [(name, first.setdefault(id(m), name), type(m).__name__) for name, m in modules]


@pytest.fixture
def flow() -> Flow:
    return Flow()
