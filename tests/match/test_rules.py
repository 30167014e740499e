"""Which rule applies: PyTorch's precedence, and where ours honours more."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import QConfig as TorchQConfig
from torch.ao.quantization import QConfigMapping as TorchMapping
from torch.ao.quantization.backend_config.x86 import get_x86_backend_config
from torch.ao.quantization.observer import MinMaxObserver as TorchMinMax

from backquant.backend_config import get_backend_config
from backquant.fuse import apply_fusion
from backquant.graph import GraphIndex, capture
from backquant.match import Outcome, Plan, RuleKind, make_plan, plan_fusion
from backquant.match.rules import RuleTable, resolve
from backquant.observe import MinMaxObserver
from backquant.qconfig import QConfig, QConfigMapping, default_qconfig

# Rules for parts of fused modules differ on purpose when they disagree or are None: tested below.
PARTS = [nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.ReLU]
TYPES = [
    nn.Sigmoid, nn.Tanh, nn.Sequential, nn.ModuleList, nn.MaxPool2d,
    nn.LayerNorm, torch.cat, torch.add, F.relu, F.adaptive_avg_pool2d, torch.flatten, "view",
    "reshape", "size", "permute",
]  # fmt: skip
REGEXES = [r".*conv", r"blocks\.\d+", r"layers", r"s", r".*1$", r"conv"]


def marked(number: int) -> tuple[Any, Any]:
    """PyTorch's and our QConfig that can be told by their range."""
    theirs = TorchMinMax.with_args(quant_min=0, quant_max=number)
    ours = MinMaxObserver.with_args(quant_min=0, quant_max=number)
    return TorchQConfig(theirs, theirs), QConfig(ours, ours)


def random_mappings(model: nn.Module, seed: int) -> tuple[TorchMapping, QConfigMapping]:
    """The same random rules in both languages."""
    pick = random.Random(seed)
    names = [name for name, _ in model.named_modules() if name] or ["none"]
    theirs, ours = TorchMapping(), QConfigMapping()

    def value() -> tuple[Any, Any]:
        return (None, None) if pick.random() < 0.2 else marked(pick.randrange(1, 255))

    def both(setter: str, *key: Any) -> None:
        a, b = value()
        getattr(theirs, setter)(*key, a)
        getattr(ours, setter)(*key, b)

    if pick.random() < 0.7:
        both("set_global")
    if pick.random() < 0.5:
        a, b = marked(255)
        for part in PARTS:
            theirs.set_object_type(part, a)
            ours.set_object_type(part, b)
    for kind in pick.sample(TYPES, 5):
        both("set_object_type", kind)
    for pattern in pick.sample(REGEXES, 2):
        both("set_module_name_regex", pattern)
    for _ in range(2):
        both("set_module_name", pick.choice(names))
    for _ in range(4):
        path = pick.choice(["", *names])
        both(
            "set_module_name_object_type_order",
            path,
            pick.choice(PARTS + TYPES[:-4]),
            pick.randrange(2),
        )
    return theirs, ours


def mark_of(qconfig: Any) -> int | None:
    return None if qconfig is None else qconfig.activation().quant_max


@pytest.mark.parametrize("seed", range(12))
def test_rules_equal_pytorchs(zoo_model: SimpleNamespace, seed: int, oracle: Any) -> None:
    theirs, ours = random_mappings(zoo_model.model, seed)
    expected = oracle(zoo_model.model, zoo_model.inputs, theirs, get_x86_backend_config())
    backend = get_backend_config("x86")
    captured = capture(zoo_model.model)
    fusions = plan_fusion(captured.module, backend)
    fused, scopes, *_ = apply_fusion(
        captured.module, captured.scopes, fusions, backend, is_qat=False
    )
    hits = resolve(GraphIndex(fused), scopes, RuleTable(ours), backend)
    calls = [n.name for n in fused.graph.nodes if n.op.startswith("call")]
    assert {name: mark_of(hits[name].qconfig) for name in calls} == {
        name: mark_of(expected.qconfigs[name]) for name in calls
    }


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)
        self.bn = nn.BatchNorm2d(2)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(2, 2)

    def forward(self, x):
        return self.fc(torch.add(self.relu(self.bn(self.conv(x))), 1)).sigmoid()


def decide(mapping: QConfigMapping, model: nn.Module | None = None) -> Plan:
    backend = get_backend_config("x86")
    captured = capture((model or Tower()).eval())
    fusions = plan_fusion(captured.module, backend)
    fused, scopes, *_ = apply_fusion(
        captured.module, captured.scopes, fusions, backend, is_qat=False
    )
    return make_plan(fused, scopes, backend, mapping, fusions=fusions)


def test_fused_module_takes_the_rule_of_its_first_part() -> None:
    decided = decide(QConfigMapping().set_object_type(nn.Conv2d, default_qconfig))
    assert decided.decisions["conv"].quantized
    assert decided.decisions["conv"].rule is not None
    assert decided.decisions["conv"].rule.kind is RuleKind.OBJECT_TYPE
    assert not decided.decisions["fc"].quantized


@pytest.mark.parametrize("part", [nn.Conv2d, nn.ReLU])
def test_none_for_a_part_by_type_is_honoured(part: type) -> None:
    mapping = QConfigMapping().set_global(default_qconfig).set_object_type(part, None)
    decision = decide(mapping).decisions["conv"]
    assert decision.outcome is Outcome.FLOAT
    assert decision.reasons[0].rule == "qconfig-none"
    assert part.__name__ in decision.reasons[0].asked


@pytest.mark.parametrize("path", ["conv", "bn", "relu"])
def test_none_for_a_part_by_name_is_honoured(path: str) -> None:
    mapping = QConfigMapping().set_global(default_qconfig).set_module_name(path, None)
    decision = decide(mapping).decisions["conv"]
    assert decision.outcome is Outcome.FLOAT
    assert f'module_name "{path}"' in decision.reasons[0].asked


def test_none_for_one_node_of_a_functional_match_is_honoured() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2, 2))

        def forward(self, x):
            return F.relu(F.linear(x, self.w))

    mapping = QConfigMapping().set_global(default_qconfig).set_object_type(F.linear, None)
    decided = decide(mapping, Net())
    assert [d.outcome for d in decided.decisions.values()] == [Outcome.FLOAT, Outcome.FLOAT]
    assert len(decided.matches) == 1


def test_rules_that_do_nothing_are_reported() -> None:
    mapping = (
        QConfigMapping()
        .set_global(default_qconfig)
        .set_object_type(nn.GELU, default_qconfig)
        .set_module_name("relu", default_qconfig)
        .set_module_name("cnov", default_qconfig)
        .set_module_name_regex("head.*", default_qconfig)
        .set_module_name_object_type_order("", torch.add, 7, default_qconfig)
    )
    decided = decide(mapping)
    assert [rule.kind.value for rule in decided.unused_rules] == [
        "object_type", "module_name_regex", "module_name", "module_name",
        "module_name_object_type_order",
    ]  # fmt: skip
    assert decided.notes == (
        'module_name_regex "head.*" applies to no module',
        'module_name "relu" does nothing: "relu" became a part of "conv"',
        'module_name "cnov" matches no module (did you mean "conv"?)',
        'module_name_object_type_order " torch.add [7]" applies to no operator',
    )


def test_parametrized_modules_keep_their_type() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    nn.utils.parametrizations.weight_norm(model[0])
    decided = decide(QConfigMapping().set_object_type(nn.Linear, default_qconfig), model)
    assert decided.decisions["_0"].rule is not None
    assert decided.decisions["_0"].operator == "Linear"
