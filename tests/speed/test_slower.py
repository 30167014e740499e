"""What ``quantize`` leaves in float because it is slower on integers, by a clock that we set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant import QConfigMapping, get_default_qconfig_mapping
from backquant.api import flow
from backquant.errors import InputError, UsageError
from backquant.runtime import QuantizedModel
from backquant.speed.against_float import Timing
from backquant.speed.slower import slower_choice

X = torch.randn(4, 8)


class Net(nn.Module):
    """Three layers of different widths, so that a clock can tell them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 16), nn.Linear(16, 24), nn.Linear(24, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(torch.relu(self.two(torch.relu(self.one(x)))))


class Clock:
    """Integer kernels take 10 µs, those that give ``slow`` columns 100, or 24 columns 20; everything else
    takes 30. A whole
    quantized model takes as many milliseconds as it has kernels, and one; the float model ``whole``."""

    def __init__(self, *slow: int, whole: float = 1.0) -> None:
        self.slow, self.whole = slow, whole
        self.timed = 0

    def __call__(self, run: Callable[[], Any]) -> float:
        self.timed += 1
        model = getattr(run, "func", None)
        if isinstance(model, QuantizedModel):
            return 1e-3 * (1 + len(model.kernels))
        if isinstance(model, nn.Module):
            return self.whole
        found = run()
        if not isinstance(found, tuple):  # a conversion
            return 1e-6
        program = str(run.func._function.graph)  # type: ignore[attr-defined]
        integers = "quantized::" in program or "onednn::" in program
        slow = any(tensor.dim() > 1 and tensor.shape[-1] in self.slow for tensor in found)
        middle = any(tensor.dim() > 1 and tensor.shape[-1] == 24 for tensor in found)
        return 30e-6 if not integers else 100e-6 if slow else 20e-6 if middle else 10e-6


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Clock], Clock]:
    def use(clock: Clock) -> Clock:
        monkeypatch.setattr(flow, "TIMING", Timing(clock, least=0))
        return clock

    return use


def left(model: QuantizedModel) -> dict[str, str]:
    """What was left in float for its speed, with the reason."""
    return {
        decision.module_path or decision.node: reason.admitted
        for decision in model.plan.decisions.values()
        for reason in decision.reasons
        if reason.rule == "slower-than-float"
    }


def quantized(**options: Any) -> QuantizedModel:
    return backquant.quantize(Net(), X, calibration=[X], **options)


def test_what_is_slower_stays_float_with_both_figures(
    timed: Callable[[Clock], Clock],
) -> None:
    timed(Clock(32))
    model = quantized()
    assert set(left(model)) == {"three"}
    row = next(row for row in model.report.rows if row.module_path == "three")
    assert not row.quantized
    assert row.reasons[-1].rule == "slower-than-float"
    assert row.reasons[-1].asked.startswith("integers: 99.0 µs")
    assert row.reasons[-1].admitted.startswith("float: ")
    assert model.report.coverage == pytest.approx((8 * 16 + 16 * 24) / (8 * 16 + 16 * 24 + 24 * 32))
    assert torch.isfinite(model(X)).all()


def test_nothing_is_slower(timed: Callable[[Clock], Clock]) -> None:
    clock = timed(Clock())
    assert not left(quantized())
    assert clock.timed


def test_keep(timed: Callable[[Clock], Clock]) -> None:
    clock = timed(Clock(32))
    assert not left(quantized(slower="keep"))
    assert not clock.timed


def test_a_mapping_is_kept_unless_asked(timed: Callable[[Clock], Clock]) -> None:
    clock = timed(Clock(32))
    mapping = get_default_qconfig_mapping("x86")
    assert not left(quantized(qconfig_mapping=mapping))
    assert not clock.timed
    assert set(left(quantized(qconfig_mapping=mapping, slower="float"))) == {"three"}


def test_what_a_rule_names_stays_on_integers(timed: Callable[[Clock], Clock]) -> None:
    timed(Clock(32, 24))
    qconfig = get_default_qconfig_mapping("x86").global_qconfig
    named = QConfigMapping().set_global(qconfig).set_module_name("three", qconfig)
    assert set(left(quantized(qconfig_mapping=named, slower="float"))) == {"two"}


def test_what_is_required_stays_on_integers(timed: Callable[[Clock], Clock]) -> None:
    timed(Clock(32, 24))
    assert set(left(quantized(require=["three"]))) == {"two"}


def test_a_share_that_is_required_is_kept_with_a_note(timed: Callable[[Clock], Clock]) -> None:
    timed(Clock(32))
    model = quantized(require=0.9)
    assert model.report.coverage == 1.0 and not left(model)
    assert any("less than required is faster" in note for note in model.report.notes)


def test_where_all_is_slower_the_least_slow_stays(timed: Callable[[Clock], Clock]) -> None:
    timed(Clock(16, 24, 32))
    model = quantized()
    assert len(left(model)) == 2 and model.kernels


def test_the_whole_has_to_be_faster(
    timed: Callable[[Clock], Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sum of the parts promises and the whole does not keep changes nothing."""
    clock = timed(Clock(32))

    def whole(run: Callable[[], Any]) -> float:
        return 1e-3 if isinstance(getattr(run, "func", None), QuantizedModel) else clock(run)

    monkeypatch.setattr(flow, "TIMING", Timing(whole, least=0))
    assert not left(quantized())


def test_small_models_and_backends_without_an_engine_are_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(32)
    monkeypatch.setattr(flow, "TIMING", Timing(clock))
    quantized()
    monkeypatch.setattr(flow, "TIMING", Timing(clock, least=0))
    quantized(backend="onnxruntime")
    assert not clock.timed


def test_the_figures_are_saved(timed: Callable[[Clock], Clock], tmp_path: Any) -> None:
    timed(Clock(32))
    model = quantized()
    backquant.save(model, tmp_path / "m.bq")
    again = backquant.load(tmp_path / "m.bq")
    assert left(again) == left(model) != {}
    assert torch.equal(again(X), model(X))


def test_the_model_is_unchanged(
    timed: Callable[[Clock], Clock], unchanged: Callable[[nn.Module], Any]
) -> None:
    timed(Clock(32))
    model = Net()
    with unchanged(model):
        backquant.quantize(model, X, calibration=[X])


@pytest.mark.parametrize("choice", ["fast", "", 1, True])
def test_another_choice_is_refused(choice: Any, snapshot: Any) -> None:
    with pytest.raises(UsageError) as caught:
        quantized(slower=choice)
    snapshot("slower-choice", caught.value, {repr(choice): "<choice>"})
    assert slower_choice("keep", has_mapping=False) is False


@pytest.mark.parametrize("backend", ["x86", "onednn", "fbgemm", "qnnpack"])
def test_the_real_clock_on_every_engine(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it finds, the model runs and says what it left."""
    monkeypatch.setattr(flow, "TIMING", Timing(least=0))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).eval()
    x = torch.randn(2, 3, 8, 8)
    made = backquant.quantize(model, x, backend=backend, calibration=[x])
    assert bool(made.kernels) == bool(made.report.quantized)
    assert any(note.startswith("the whole model") for note in made.report.notes)
    assert made(x).shape == (2, 10)


@pytest.mark.parametrize(("whole", "kept"), [(4.5e-3, 3), (3.5e-3, 2), (2.5e-3, 1)])
def test_a_model_is_not_slower_as_a_whole(
    timed: Callable[[Clock], Clock], whole: float, kept: int
) -> None:
    """All layers promise to be faster; what pays the least is left in float until the whole is not slower."""
    timed(Clock(whole=whole))
    layers = [nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 24)]
    model = backquant.quantize(nn.Sequential(*layers), X, calibration=[X])
    assert len(model.kernels) == kept
    reasons = [r for d in model.plan.decisions.values() for r in d.reasons]
    found = [r for r in reasons if r.rule == "slower-than-float"]
    assert len(found) == 3 - kept
    assert all("µs for the whole model" in reason.asked for reason in found)
    [note] = [note for note in model.report.notes if note.startswith("the whole model")]
    assert note.endswith("times as fast)")


class Attention(nn.Module):
    """A layer that is taken apart, and slower for it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.fc = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.attention(x, x, x)[0])


def test_what_is_slower_whatever_is_left_in_float_is_given_back_as_it_came(
    timed: Callable[[Clock], Clock], tmp_path: Any
) -> None:
    timed(Clock(whole=1e-3))
    model, x = Attention().eval(), torch.randn(2, 5, 8)
    made = backquant.quantize(model, x, calibration=[x])
    assert not made.kernels and made.report.coverage == 0.0
    assert set(left(made)) == {"attention", "fc"}
    [note] = [note for note in made.report.notes if note.startswith("the whole model")]
    assert "it is returned in float, unchanged (2 ms, in float 1 ms" in note
    assert note in str(made.report)
    assert isinstance(made.get_submodule("attention"), nn.MultiheadAttention)
    assert torch.equal(made(x), model(x).detach())
    backquant.save(made, tmp_path / "m.bq")
    assert torch.equal(backquant.load(tmp_path / "m.bq")(x), made(x))


@pytest.mark.parametrize(("whole", "kernels"), [(2e-3, 0), (3e-3, 1)])
def test_next_to_nothing_on_integers_has_to_be_faster(
    timed: Callable[[Clock], Clock], whole: float, kernels: int
) -> None:
    """0.4 % of the multiply-adds: what they round is lost for nothing where the whole is as fast in float."""
    timed(Clock(512, whole=whole))
    layers = [
        nn.Linear(8, 512),
        nn.Softplus(),
        nn.Linear(512, 512),
        nn.Softplus(),
        nn.Linear(512, 2),
    ]
    model = nn.Sequential(*layers)
    made = backquant.quantize(model, X, calibration=[X])
    assert len(made.kernels) == kernels
    if not kernels:
        assert torch.equal(made(X), model(X).detach())
        assert set(left(made)) == {"0", "2", "4"}
        assert any("0.4 % of its multiply-adds" in note for note in made.report.notes)


def test_a_layer_given_back_takes_its_arguments_shows_hooks_and_refuses_a_trace(
    timed: Callable[[Clock], Clock],
) -> None:
    timed(Clock(whole=1e-3))
    cell, x, h = nn.GRUCell(4, 3).eval(), torch.randn(2, 4), torch.randn(2, 3)
    model, seen = backquant.quantize(cell, x, calibration=[x]), []
    assert model.kernels == () and model.replays is None
    for args, kwargs in (((x,), {}), ((x, h), {}), ((x,), {"hx": h}), ((), {"input": x, "hx": h})):
        assert torch.equal(cell(*args, **kwargs), model(*args, **kwargs))
    with pytest.raises(InputError, match="fails on these inputs"):
        model(torch.randn(2, 5))
    model.grucell.register_forward_hook(lambda *_: seen.append("layer"))
    model(x)
    model.register_forward_pre_hook(lambda *_: seen.append("model"))
    model(x)
    assert seen == ["layer", "model", "layer"]
    with pytest.raises(UsageError, match="not traced"):
        torch.fx.symbolic_trace(nn.Sequential(model))


def test_what_is_required_is_given_though_it_is_slower(timed: Callable[[Clock], Clock]) -> None:
    timed(Clock(whole=1e-3))
    model, x = Attention().eval(), torch.randn(2, 5, 8)
    made = backquant.quantize(model, x, calibration=[x], require=["fc"])
    assert made.kernels
    assert any(note.endswith("with any layers in float") for note in made.report.notes)
