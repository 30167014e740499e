"""Each printed fix is applied; then the node is quantized."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import backquant.observe
import backquant.qconfig
from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    get_backend_config,
    list_backends,
)
from backquant.fuse import apply_fusion
from backquant.graph import capture
from backquant.match import Outcome, make_plan, plan_fusion
from backquant.observe import (
    FakeQuantize,
    FixedQParamsObserver,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)
from backquant.qconfig import QConfig, QConfigMapping

REQUESTS = {
    "signed": QConfig(
        HistogramObserver.with_args(dtype=torch.qint8),
        PerChannelMinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_channel_symmetric),
    ),
    "plain": QConfig(
        MinMaxObserver.with_args(dtype=torch.uint8), MinMaxObserver.with_args(dtype=torch.int8)
    ),
    "half": QConfig(
        PlaceholderObserver.with_args(dtype=torch.float16),
        PlaceholderObserver.with_args(dtype=torch.float16),
    ),
    "training": QConfig(
        FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, dtype=torch.qint8),
        FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, dtype=torch.qint8),
    ),
    "dynamic": QConfig(
        PlaceholderObserver.with_args(dtype=torch.qint8, is_dynamic=True),
        MinMaxObserver.with_args(dtype=torch.qint8),
    ),
}


# Of these requests the backend admits all that the zoo has entries for.
ADMITTED = {("tensorrt", "signed"), ("tensorrt", "training")}


def run_fix(fix: str, mapping: QConfigMapping) -> None:
    names: dict[str, Any] = {"torch": torch, "operator": operator, "qconfig_mapping": mapping}
    for module in (backquant.observe, backquant.qconfig):
        names.update({name: getattr(module, name) for name in module.__all__})
    exec(fix, names)


@pytest.mark.parametrize("request_name", list(REQUESTS))
@pytest.mark.parametrize("backend_name", ["x86", "qnnpack", "tensorrt"])
def test_fixes_of_the_zoo(zoo_model: SimpleNamespace, backend_name: str, request_name: str) -> None:
    backend = get_backend_config(backend_name)
    captured = capture(zoo_model.model)
    fusions = plan_fusion(captured.module, backend)
    fused, scopes, *_ = apply_fusion(
        captured.module, captured.scopes, fusions, backend, is_qat=False
    )
    mapping = QConfigMapping().set_global(REQUESTS[request_name])
    refused = [
        (name, decision.reasons[0].fix)
        for name, decision in make_plan(fused, scopes, backend, mapping).decisions.items()
        if decision.outcome is Outcome.FLOAT and decision.reasons[0].rule != "no-entry"
    ]
    assert refused or (backend_name, request_name) in ADMITTED
    for name, fix in refused:
        changed = QConfigMapping().set_global(REQUESTS[request_name])
        run_fix(fix, changed)
        decision = make_plan(fused, scopes, backend, changed).decisions[name]
        assert decision.quantized, f"{fix}\n{decision}"


class EveryKind(nn.Module):
    """Operators with weights, with fixed qparams, recurrent, embedding, and functions of each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.up, self.fc, self.gate = nn.ConvTranspose2d(4, 4, 1), nn.Linear(4, 4), nn.Sigmoid()
        self.embedding, self.scale = nn.Embedding(4, 4), nn.LayerNorm(4)
        self.softmax, self.cell, self.lstm = nn.Softmax(1), nn.GRUCell(4, 4), nn.LSTM(4, 4)
        self.weight = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x, i):
        x = self.up(torch.relu(self.norm(self.conv(x)))).mean([2, 3])
        x = self.scale(nn.functional.linear(self.gate(self.fc(x)), self.weight))
        x = self.cell(self.softmax(torch.tanh(x) + self.embedding(i)).tanh())
        x = self.lstm(x)[0].reshape(-1, 4)
        return torch.cat([x, x + 1], 1).hardsigmoid()


@pytest.mark.parametrize("backend_name", list_backends())
def test_fixes_where_nothing_was_asked(backend_name: str) -> None:
    backend = get_backend_config(backend_name)
    captured = capture(EveryKind().eval())
    fusions = plan_fusion(captured.module, backend)
    fused, scopes, *_ = apply_fusion(
        captured.module, captured.scopes, fusions, backend, is_qat=False
    )
    before = make_plan(fused, scopes, backend, QConfigMapping()).decisions
    refused = {
        name: decision.reasons[0].fix
        for name, decision in before.items()
        if decision.outcome is Outcome.FLOAT and decision.reasons[0].rule == "qconfig-none"
    }
    # qnnpack_pt2e is for aten graphs; x86_lowbit and checkpoints have linear layers and embeddings
    few = {"qnnpack_pt2e": 0, "x86_lowbit": 3, "mlx": 3, "gguf": 3}
    few |= {"compressed_tensors": 2, "gptq": 2, "awq": 2, "torchao": 2}
    assert len(refused) >= few.get(backend_name, 7)
    for name, fix in refused.items():
        mapping = QConfigMapping()
        run_fix(fix, mapping)
        decision = make_plan(fused, scopes, backend, mapping).decisions[name]
        if decision.reasons and {r.rule for r in decision.reasons} & {"group-size"}:
            continue  # groups of the usual size; the reason says which size these few weights take
        if backend.qdq and backend.qdq.leave_float and not decision.quantized:
            # the target never quantizes it there: the reason names the place, or the neighbour in float
            assert decision.reasons[-1].rule in ("float-neighbours", "float-place"), decision
            continue
        assert decision.quantized, f"{fix}\n{decision}"


def test_fix_where_nothing_was_asked_of_a_backend_without_a_name() -> None:
    entry = BackendPatternConfig(nn.Linear).set_root_module(nn.Linear)
    entry.add_dtype_config(DTypeConfig(torch.int8, torch.int8, torch.int8, torch.float))
    backend = BackendConfig("mine").set_backend_pattern_config(entry)
    captured = capture(nn.Sequential(nn.Linear(2, 2)))
    mapping = QConfigMapping()
    before = make_plan(captured.module, captured.scopes, backend, mapping).decisions["_0"]
    run_fix(before.reasons[0].fix, mapping)
    assert make_plan(captured.module, captured.scopes, backend, mapping).decisions["_0"].quantized


def decide_one(model: nn.Module, demand: DTypeWithConstraints, qconfig: QConfig) -> Any:
    entry = BackendPatternConfig(nn.Linear).set_root_module(nn.Linear)
    entry.add_dtype_config(DTypeConfig(demand, demand, demand, torch.float))
    backend = BackendConfig("demanding").set_backend_pattern_config(entry)
    captured = capture(model)

    def decide(mapping: QConfigMapping) -> Any:
        decided = make_plan(captured.module, captured.scopes, backend, mapping)
        return decided.decisions["_0"]

    mapping = QConfigMapping().set_global(qconfig)
    before = decide(mapping)
    run_fix(before.reasons[0].fix, mapping)
    return before, decide(mapping)


@pytest.mark.parametrize(
    "demand",
    [
        DTypeWithConstraints(torch.qint8, quant_min_lower_bound=-127),
        DTypeWithConstraints(torch.qint8, quant_max_upper_bound=64),
        DTypeWithConstraints(torch.qint8, scale_min_lower_bound=2**-10),
        DTypeWithConstraints(torch.qint8, symmetric=True),
        DTypeWithConstraints(torch.qint8, granularity="per_channel", ch_axis=1),
        DTypeWithConstraints(torch.qint8, granularity="per_channel", symmetric=False),
        DTypeWithConstraints(torch.qint8, scale_exact_match=2**-8, zero_point_exact_match=-128),
        DTypeWithConstraints(torch.quint8, zero_point_exact_match=3),
    ],
    ids=repr,
)
def test_fixes_of_each_constraint(demand: DTypeWithConstraints) -> None:
    wide = MinMaxObserver.with_args(dtype=torch.qint8)
    before, after = decide_one(nn.Sequential(nn.Linear(2, 2)), demand, QConfig(wide, wide))
    assert before.outcome is Outcome.FLOAT
    assert after.quantized, f"{before}\n{after}"


def test_what_was_admitted_is_kept() -> None:
    activation = HistogramObserver.with_args(dtype=torch.qint8, bins=512)
    demand = DTypeWithConstraints(torch.qint8, quant_min_lower_bound=-128)
    fixed = FixedQParamsObserver.with_args(scale=0.1, zero_point=0, dtype=torch.quint8)
    before, after = decide_one(nn.Sequential(nn.Linear(2, 2)), demand, QConfig(activation, fixed))
    assert "HistogramObserver.with_args(dtype=torch.qint8, bins=512)" in before.reasons[0].fix
    assert after.quantized


def test_fix_overrides_the_rule_that_asked() -> None:
    """A narrow rule asked: the fix has to be at least as narrow."""
    backend = get_backend_config("x86")
    captured = capture(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    wrong = REQUESTS["plain"]
    mapping = QConfigMapping().set_module_name_object_type_order("", nn.Linear, 1, wrong)
    decided = make_plan(captured.module, captured.scopes, backend, mapping)
    assert "no rule" in decided.decisions["_0"].reasons[0].asked
    for name in ("_0", "_1"):
        run_fix(decided.decisions[name].reasons[0].fix, mapping)
    after = make_plan(captured.module, captured.scopes, backend, mapping)
    assert [d.quantized for d in after.decisions.values()] == [True, True]
