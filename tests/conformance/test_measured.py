"""Rules that only measured scales can answer: both sides of the bound, and uses that are drawn again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

import backquant
from backquant.backend_config import BackendConfig, DTypeConfig, get_backend_config
from backquant.conformance import ConformanceVerdict as Verdict
from backquant.conformance.attempt import Setting, refused_after_calibration
from backquant.conformance.engine_protocol import NotAskedError
from backquant.conformance.engines import find_conformance_engine
from backquant.conformance.results import Side, Trial
from backquant.conformance.run import claims, outcomes_of
from backquant.conformance.torch_engines import TorchEngine
from backquant.conformance.tosa.engine import TosaEngine
from backquant.errors import EngineError
from backquant.match import Reason

_REASON = Reason("add", "bias-step", "a coarse bias", "a finer one", "")


def with_bound(bound: float | None) -> BackendConfig:
    """qnnpack with this bound of linear layers."""
    backend = get_backend_config("qnnpack")
    for entry in backend.configs:
        configs = []
        for config in entry.dtype_configs:
            given = config.to_dict()
            if given.pop("bias_step_upper_bound", None) is not None and bound is not None:
                given["bias_step_upper_bound"] = bound
            configs.append(DTypeConfig.from_dict(given))
        entry.set_dtype_configs(configs)
    return backend


def at_the_bound(backend: BackendConfig, pattern: str) -> set[tuple[str, Verdict]]:
    setting = Setting(backend, find_conformance_engine(backend, None))
    found = set()
    for claim in claims(backend, [pattern]):
        if claim.pattern != pattern:
            continue
        for _, outcome in outcomes_of([Trial(claim, 0, Side.REFUSED)], setting):
            if outcome is not None and "bias_step" in outcome.case:
                found.add((outcome.side.value, outcome.verdict))
    return found


@pytest.mark.parametrize("pattern", ["torch.nn.Linear", "torch.conv2d", "torch.nn.ConvTranspose1d"])
def test_both_sides_of_the_bound(pattern: str) -> None:
    wanted = {("accepted", Verdict.CONFORMS), ("refused", Verdict.CONFORMS)}
    assert at_the_bound(get_backend_config("qnnpack"), pattern) == wanted


def test_a_bound_that_is_too_wide_or_too_narrow() -> None:
    assert ("accepted", Verdict.NOT_INTEGER) in at_the_bound(with_bound(2.0), "torch.nn.Linear")
    assert ("refused", Verdict.TOO_NARROW) in at_the_bound(with_bound(0.25), "torch.nn.Linear")


@pytest.mark.parametrize("functional", [False, True])
def test_a_coarse_bias_stays_float_with_the_rule(functional: bool) -> None:
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.weight, 10.0)
    nn.init.constant_(layer.bias, -39.99)  # next to nothing is left by the ReLU
    x = torch.rand(8, 4) * 2 - 1
    x[0] = 1.0

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if functional:
                made = nn.functional.linear(x, self.layer.weight, self.layer.bias)
                return nn.functional.relu(made)
            return nn.functional.relu(self.layer(x))

    mapping = backquant.get_default_qconfig_mapping("qnnpack")
    prepared = backquant.prepare_fx(Layer().eval(), mapping, (x,), backend_config="qnnpack")
    with torch.no_grad():
        prepared(x)
    refusal = refused_after_calibration(prepared)
    assert refusal is not None and refusal.rule == "bias-step"
    assert refusal.admitted == "a bias beside input × weight / output scale ≤ 1"
    with torch.no_grad():
        for parameter in prepared.parameters():
            if parameter.dim() == 1:
                parameter.zero_()
    assert refused_after_calibration(prepared) is None  # nothing is rounded


def test_uses_that_scales_refuse_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from backquant.conformance import attempt

    asked: list[fx.GraphModule] = []

    def first_two(prepared: fx.GraphModule) -> object:
        asked.append(prepared)
        return _REASON if len(asked) < 3 else None

    monkeypatch.setattr(attempt, "refused_after_calibration", first_two)
    found = backquant.conform("qnnpack", entries=["nn.ReLU(torch.add"], rounds=1, jobs=0)
    assert found.conforms and len(asked) >= 3


def test_an_engine_that_cannot_be_asked() -> None:
    class Silent(TorchEngine):
        def build(self, prepared: fx.GraphModule, example: tuple[torch.Tensor, ...]) -> Any:
            raise NotAskedError("there is no form of it in its files")

    found = backquant.conform(
        "x86", engine=Silent("x86"), entries=["ReLU(torch.add"], rounds=1, jobs=0
    )
    assert found.conforms and found.counts[Verdict.UNTRIED] == 1


def test_what_the_accelerators_need_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from backquant.conformance.tosa import engine

    monkeypatch.setattr(engine, "_program", lambda: None)
    with pytest.raises(EngineError, match="pip install tosa-tools ethos-u-vela"):
        TosaEngine("ethos_u85").versions()
    assert find_conformance_engine(BackendConfig("ethos_u55"), None).name == "ethos_u55"
