"""Verdicts equal PyTorch's for many requests; the differences are pinned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.ao.quantization as tq
from torch.ao.quantization.backend_config import (
    get_executorch_backend_config,
    get_native_backend_config,
    get_qnnpack_backend_config,
    get_tensorrt_backend_config,
)

import backquant.observe as bo
import backquant.qconfig as bq
from backquant.backend_config import get_backend_config
from backquant.fuse import apply_fusion
from backquant.graph import capture
from backquant.match import Decision, Outcome, make_plan, plan_fusion
from unkept import SYMMETRIC, as_kept

BACKENDS: dict[str, Any] = {
    "native": get_native_backend_config,
    "qnnpack": get_qnnpack_backend_config,
    "tensorrt": get_tensorrt_backend_config,
    "executorch": get_executorch_backend_config,
}
NAMED = [
    "default_qconfig",
    "default_per_channel_qconfig",
    "default_dynamic_qconfig",
    "per_channel_dynamic_qconfig",
    "float16_dynamic_qconfig",
    "float16_static_qconfig",
    "float_qparams_weight_only_qconfig",
    "float_qparams_weight_only_qconfig_4bit",
    "default_symmetric_qnnpack_qconfig",
    "default_per_channel_symmetric_qnnpack_qconfig",
    "default_reuse_input_qconfig",
    "default_qat_qconfig",
]
DTYPES = [
    (torch.qint8, torch.qint8),
    (torch.quint8, torch.quint8),
    (torch.uint8, torch.int8),
    (torch.int8, torch.int8),
    (torch.int16, torch.qint8),
    (torch.float16, torch.float16),
]


def requests() -> dict[str, tuple[Any, Any]]:
    """PyTorch's and our QConfig of one meaning."""
    found = {name: (getattr(tq.qconfig, name), getattr(bq, name)) for name in NAMED}
    for act, weight in DTYPES:
        name = f"{act}-{weight}".replace("torch.", "")
        found[name] = tuple(  # type: ignore[assignment]
            cls(
                activation=package.PlaceholderObserver.with_args(dtype=act)
                if act == torch.float16
                else package.MinMaxObserver.with_args(dtype=act),
                weight=package.PlaceholderObserver.with_args(dtype=weight)
                if weight == torch.float16
                else package.MinMaxObserver.with_args(dtype=weight),
            )
            for cls, package in ((tq.QConfig, tq.observer), (bq.QConfig, bo))
        )
    return found


REQUESTS = requests()


def refused_for_module_weight(decision: Decision) -> bool:
    """Whether some dtype config was refused for the weight of a module and nothing else."""
    by_place: dict[str, set[str]] = {}
    for reason in decision.reasons:
        by_place.setdefault(reason.place, set()).add(reason.asked.split()[0])
    return {"weight"} in by_place.values() or {"bias"} in by_place.values()


def refused_for_scheme(decision: Decision) -> bool:
    """Whether an affine scheme was asked for, and a symmetric one is admitted."""
    return any("affine" in r.asked and "symmetric" in r.admitted for r in decision.reasons)


@pytest.mark.parametrize("zoo_model", ["attention", "functional", "mlp", "squeeze"], indirect=True)
@pytest.mark.parametrize("request_name", list(REQUESTS))
@pytest.mark.parametrize("backend_name", list(BACKENDS))
def test_verdicts_equal(
    zoo_model: SimpleNamespace, backend_name: str, request_name: str, observed_by_torch: Any
) -> None:
    theirs, ours = REQUESTS[request_name]
    expected = observed_by_torch(
        zoo_model.model,
        zoo_model.inputs,
        tq.QConfigMapping().set_global(theirs),
        as_kept(backend_name, BACKENDS[backend_name]()),
    )
    backend = get_backend_config(backend_name)
    captured = capture(zoo_model.model)
    fusions = plan_fusion(captured.module, backend)
    fused, scopes, *_ = apply_fusion(
        captured.module, captured.scopes, fusions, backend, is_qat=False
    )
    decided = make_plan(fused, scopes, backend, bq.QConfigMapping().set_global(ours))
    modules = {node.name for node in fused.graph.nodes if node.op == "call_module"}
    for name, decision in decided.decisions.items():
        quantized = decision.outcome is Outcome.QUANTIZED
        if quantized is not (name in expected):
            assert not quantized, f"{name}: only ours is quantized"
            if backend_name in SYMMETRIC and refused_for_scheme(decision):
                continue
            assert name in modules, str(decision)
            assert refused_for_module_weight(decision), str(decision)


class Both(torch.nn.Module):
    """One linear layer as a module, one as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 2)
        self.w = torch.nn.Parameter(torch.zeros(2, 2))

    def forward(self, x):
        return torch.nn.functional.linear(self.module(x), self.w)


def test_weight_constraints_count_for_modules_too(observed_by_torch: Any) -> None:
    """PyTorch admits the module although qnnpack's int8 weights must not hold -128."""
    wide, eps = {"quant_min": -128, "quant_max": 127}, 2**-12
    theirs = tq.QConfig(
        tq.MinMaxObserver.with_args(dtype=torch.qint8, eps=eps),
        tq.MinMaxObserver.with_args(dtype=torch.qint8, eps=eps, **wide),
    )
    ours = bq.QConfig(
        bo.MinMaxObserver.with_args(dtype=torch.qint8, eps=eps),
        bo.MinMaxObserver.with_args(dtype=torch.qint8, eps=eps, **wide),
    )
    expected = observed_by_torch(
        Both().eval(),
        (torch.zeros(1, 2),),
        tq.QConfigMapping().set_global(theirs),
        get_qnnpack_backend_config(),
    )
    captured = capture(Both().eval())
    decided = make_plan(
        captured.module,
        captured.scopes,
        get_backend_config("qnnpack"),
        bq.QConfigMapping().set_global(ours),
    )
    assert expected == {"module"}
    assert [d.outcome for d in decided.decisions.values()] == [Outcome.FLOAT, Outcome.FLOAT]
    for decision in decided.decisions.values():
        assert decision.reasons[0].rule == "quant-range"
        assert decision.reasons[0].asked.startswith("weight qint8 [-128, 127]")


@pytest.mark.parametrize("tail", [[], [torch.nn.ReLU()]], ids=["alone", "fused"])
@pytest.mark.parametrize(("low", "quantized"), [(-127, True), (-128, False)])
def test_weights_of_modules_are_looked_at(tail: list[Any], low: int, quantized: bool) -> None:
    """Different from PyTorch: it looks at weights that are arguments only, so -128 reaches the device."""
    weight = bo.MinMaxObserver.with_args(
        dtype=torch.qint8,
        qscheme=torch.per_tensor_symmetric,
        quant_min=low,
        quant_max=127,
        eps=2**-12,
    )
    activation = bo.MinMaxObserver.with_args(dtype=torch.qint8, eps=2**-12)
    mapping = bq.QConfigMapping().set_global(bq.QConfig(activation, weight))
    backend = get_backend_config("executorch")
    captured = capture(torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), *tail).eval())
    fusions = plan_fusion(captured.module, backend)
    fused, scopes, *_ = apply_fusion(
        captured.module, captured.scopes, fusions, backend, is_qat=False
    )
    [decision] = make_plan(fused, scopes, backend, mapping, fusions=fusions).decisions.values()
    assert decision.quantized is quantized
