"""What tests of lowering share: reference models in the decomposed dialect, written by hand (a forward
that calls quantize and dequantize where convert would put them)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Tracer

from backquant.backend_config import get_backend_config
from backquant.convert import convert_to_reference
from backquant.dtypes import QParams
from backquant.engines import onednn
from backquant.fuse import plan_fused
from backquant.graph import capture
from backquant.graph.dialect_ops import register_quantized_decomposed
from backquant.lower import Lowered, engine_info, find_engine, lower
from backquant.nn.intrinsic import FusedModule
from backquant.nn.quantized.reference import ReferenceModule
from backquant.prepare import Record, insert_observers

register_quantized_decomposed()

U8 = QParams(0.05, 100, 0, 255, torch.uint8)


class _Tracer(Tracer):
    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, (ReferenceModule, FusedModule)):
            return True
        return super().is_leaf_module(m, module_qualified_name)


class Toolbox:
    """What a test needs to write a reference model and to compare its lowered form with it."""

    u8 = U8

    @staticmethod
    def qparams(scale: float, zero_point: int, low: int = 0, high: int = 255) -> QParams:
        # Scales come from float32 observers; a literal that is no float32 would round differently.
        exact = float(torch.tensor(scale, dtype=torch.float32))
        dtype = torch.int8 if low < 0 else torch.uint8
        return QParams(exact, zero_point, low, high, dtype)

    @staticmethod
    def q(x: torch.Tensor, qparams: QParams) -> torch.Tensor:
        op = torch.ops.quantized_decomposed.quantize_per_tensor.default
        return op(x, *qparams.literals)

    @staticmethod
    def dq(x: torch.Tensor, qparams: QParams) -> torch.Tensor:
        op = torch.ops.quantized_decomposed.dequantize_per_tensor.default
        return op(x, *qparams.literals)

    @classmethod
    def qdq(cls, x: torch.Tensor, qparams: QParams) -> torch.Tensor:
        return cls.dq(cls.q(x, qparams), qparams)

    @staticmethod
    def weight_qparams(module: nn.Module, axis: int | None = 0) -> dict[str, Any]:
        weight: torch.Tensor = module.weight.detach()  # type: ignore[assignment]
        if axis is None:
            scale = (weight.abs().amax() / 127).clamp_min(1e-6)
            zero = torch.zeros((), dtype=torch.int64)
            return {
                "qscheme": torch.per_tensor_symmetric,
                "dtype": torch.qint8,
                "scale": scale,
                "zero_point": zero,
            }
        others = [d for d in range(weight.dim()) if d != axis]
        scale = (weight.abs().amax(others) / 127).clamp_min(1e-6)
        return {
            "qscheme": torch.per_channel_symmetric,
            "dtype": torch.qint8,
            "scale": scale,
            "zero_point": torch.zeros(len(scale), dtype=torch.int64),
            "axis": axis,
        }

    @staticmethod
    def trace(forward: Callable[..., Any], **children: Any) -> GraphModule:
        """A graph of ``forward(self, *inputs)`` on a module with these children and buffers."""

        class Written(nn.Module):
            pass

        Written.forward = forward  # type: ignore[method-assign]
        module = Written()
        for name, child in children.items():
            if isinstance(child, nn.Module):
                module.add_module(name, child)
            else:
                module.register_buffer(name, child)
        module.eval()
        return GraphModule(module, _Tracer().trace(module))

    @staticmethod
    def lower(reference: GraphModule, engine: Any = None) -> Lowered:
        return lower(reference, onednn.X86.rules(), engine or engine_info("x86"))

    @staticmethod
    def targets(lowered: Lowered) -> list[str]:
        """The operators of the lowered graph, without inputs and outputs."""
        found = []
        for node in lowered.graph_module.graph.nodes:
            if node.op == "call_module":
                found.append(type(lowered.graph_module.get_submodule(node.target)).__name__)
            elif node.op.startswith("call_"):
                found.append(getattr(node.target, "__name__", str(node.target)))
        return found

    @staticmethod
    def assert_within(
        actual: torch.Tensor, expected: torch.Tensor, scale: float, steps: int = 1
    ) -> None:
        """Floats on a grid of ``scale`` that are at most ``steps`` apart, and not all the same."""
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
        if actual.numel():
            worst = ((actual - expected).abs().max() / scale).item()
            assert worst <= steps + 1e-3, f"{worst} integer steps apart"


@pytest.fixture
def tools() -> type[Toolbox]:
    return Toolbox


def _flow(
    model: nn.Module, example: Any, mapping: Any, engine: str, backend: Any = None
) -> tuple[GraphModule, Lowered]:
    """Reference and lowered form of a model in which nothing has to be calibrated."""
    config = get_backend_config(engine) if backend is None else backend
    fused, decided = plan_fused(capture(model.eval()), config, mapping)
    prepared = insert_observers(
        fused.module,
        Record(decided, config, mapping, scopes=fused.scopes, provenance=fused.provenance),
    )
    with torch.no_grad():
        prepared(*example)
    reference = convert_to_reference(prepared)
    return reference, lower(reference, find_engine(engine).rules(), engine_info(engine))


@pytest.fixture
def flow() -> Callable[..., tuple[GraphModule, Lowered]]:
    """``flow(model, example, mapping, engine)``: reference and lowered form, without calibration."""
    return _flow
