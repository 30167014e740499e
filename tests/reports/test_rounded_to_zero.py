"""What a division, a logarithm or an inverse root reads is not rounded to 0: an epsilon keeps its meaning."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import backquant
from backquant import BackendConfig, QConfigMapping
from backquant.reason_codes import ReasonCode

DESCRIPTIONS = Path(__file__).parents[2] / "examples" / "backends"
BACKENDS = ["x86", "litert", "onnxruntime", "tensorrt", "ethos_u85", "nxp_neutron"]
GENERATOR = torch.Generator().manual_seed(1)
DATA = [torch.randn(2, 8, 8, 8, generator=GENERATOR) for _ in range(4)]
Function = Callable[[torch.Tensor], torch.Tensor]


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(8, 16, 3, padding=1)
        self.last = nn.Conv2d(16, 8, 1)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(x)))


FUNCTIONS: dict[str, Function] = {
    "division by an activation": lambda y: y / (F.relu(y) + 1e-5),
    "a norm": lambda y: y / (y.abs().sum(1, keepdim=True) + 1e-6),
    "a clamped divisor": lambda y: y / y.abs().clamp(min=1e-5),
    "moved before": lambda y: y / (F.relu(y).flip(1) + 1e-5).flip(1).reshape(y.shape),
    "a logarithm": lambda y: torch.log(F.relu(y) + 1e-6),
    "of a softmax": lambda y: torch.softmax(y * 8, 1).log(),
    "of a sigmoid": lambda y: torch.log(torch.sigmoid(y * 6)),
    "an inverse root": lambda y: y * torch.rsqrt(F.relu(y) + 1e-6),
    "a negative power": lambda y: F.relu(y) * (F.relu(y) + 1e-4) ** -0.5,
    "a reciprocal": lambda y: torch.reciprocal(F.softplus(y * 6) + 1e-4),
}


def backend(name: str) -> str | BackendConfig:
    path = DESCRIPTIONS / f"{name}.yaml"
    return BackendConfig.load(path) if path.exists() else name


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_epsilon_keeps_its_meaning(function: str, name: str) -> None:
    model = Between(FUNCTIONS[function]).eval()
    quantized = backquant.quantize(model, calibration=DATA, backend=backend(name), slower="keep")
    for x in (*DATA, torch.zeros(2, 8, 8, 8)):
        assert quantized(x).isfinite().all()
    wanted, got = (torch.cat([one(x) for x in DATA]) for one in (model, quantized))
    assert 20 * torch.log10(wanted.norm() / (wanted - got).norm()) > 12


def reasons(model: nn.Module, **options: object) -> list[str]:
    made = backquant.quantize(model, calibration=DATA, backend="litert", **options)
    return [
        row.name
        for row in made.report.rows
        for r in row.reasons
        if r.rule == ReasonCode.ROUNDED_TO_ZERO
    ]


def test_only_what_would_be_zero_stays_float() -> None:
    assert reasons(Between(lambda y: y / (F.relu(y) + 4.0)).eval()) == []
    assert reasons(Between(lambda y: y + (F.relu(y) + 1e-5)).eval()) == []
    both = Between(lambda y: (z := F.relu(y)) / (z + 1e-5)).eval()
    assert reasons(both) == ["add"]  # the ReLU is read by something else


def test_a_rule_of_ones_own_is_obeyed() -> None:
    mapping = backquant.get_default_qconfig_mapping("litert")
    mapping.set_module_name_object_type_order("", torch.add, 0, mapping.global_qconfig)
    model = Between(lambda y: y / torch.add(F.relu(y), 1e-5)).eval()
    assert "add" not in reasons(model, qconfig_mapping=mapping)


@pytest.mark.parametrize("function", ["division by an activation", "a logarithm"])
def test_the_names_of_pytorch_warn(function: str, caplog: pytest.LogCaptureFixture) -> None:
    """They quantize it, as PyTorch does."""
    model = Between(FUNCTIONS[function]).eval()
    mapping = backquant.get_default_qconfig_mapping("qnnpack")
    with caplog.at_level(logging.WARNING, "backquant"):
        backquant.prepare_fx(model, mapping, (DATA[0],), backend_config="qnnpack")
    (found,) = [r.getMessage() for r in caplog.records if "rounded to 0" in r.getMessage()]
    assert "smallest magnitude" in found
    fix = found.partition("in float: qconfig_mapping")[2]
    changed = eval(
        f"mapping{fix}", {"mapping": mapping, "torch": torch, "operator": operator, "F": F}
    )
    assert isinstance(changed, QConfigMapping)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "backquant"):
        backquant.prepare_fx(model, changed, (DATA[0],), backend_config="qnnpack")
    assert not [r for r in caplog.records if "rounded to 0" in r.getMessage()]
