from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.snapshots import compare as snapshot
from torch import nn

import backquant
from backquant.accuracy.search import loop as strategy
from backquant.accuracy.search import loop as trials
from backquant.accuracy.search import runners
from backquant.accuracy.search import runners as target_runner
from backquant.errors import CalibrationError, UsageError


class Net(nn.Module):
    """A residual, and a layer whose input has few large values, which 8 bits cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.conv2(x) + x).mean((2, 3))
        return self.fc2(torch.exp(2 * self.fc1(x)))


@pytest.fixture(autouse=True)
def few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (trials, runners, target_runner):
        monkeypatch.setattr(module, "WHOLE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def net() -> tuple[nn.Module, list[torch.Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net().eval(), [torch.randn(8, 3, 12, 12) for _ in range(2)]


def nearness(model: nn.Module, data: list[torch.Tensor]) -> Callable[[nn.Module], float]:
    with torch.no_grad():
        wanted = torch.cat([model(x) for x in data])

    def metric(other: nn.Module) -> float:
        found = torch.cat([other(x) for x in data])
        return 1 - float((found - wanted).norm() / wanted.norm())

    return metric


def test_a_drop_is_kept_by_what_runs(net: Any, tmp_path: Path) -> None:
    model, data = net
    metric, state = nearness(model, data), tmp_path / "state.json"
    arguments: dict[str, Any] = {"metric": metric, "resume": state, "times": tmp_path}
    found = backquant.search(model, data, "x86", budget={"max_drop": 0.02}, **arguments)
    assert found.met and found.hindrance == "" and found.in_float == 1.0
    assert 1 - metric(found.model) <= 0.02
    assert found.trials[0].picks == tuple(0 for _ in found.best.picks)
    in_float = {row.name for row in found.rows if row.option == "float"}
    left = {row.module_path for row in found.model.report.rows if row.outcome == "float"}
    assert {name for name in in_float if name.startswith(("conv", "fc"))} <= left
    reasons = {r.rule for d in found.model.plan.decisions.values() for r in d.reasons}
    assert not in_float or "search" in reasons or "slower-than-float" in reasons
    note = found.model.report.notes[-1]
    assert note.startswith("search within max_drop 0.02") and note.endswith("the budget is kept")
    assert found.model.report.extras["recipe"]["search"]["budget"] == {"max_drop": 0.02}

    again = backquant.search(model, data, "x86", budget={"max_drop": 0.02}, **arguments)
    assert again.trials[: len(found.trials)] == found.trials  # these were not measured anew
    backquant.save(again.model, tmp_path / "found.bq")
    same = backquant.load(tmp_path / "found.bq")
    torch.testing.assert_close(same(data[0]), again.model(data[0]), rtol=0, atol=0)

    page = found.to_html()
    assert "What accuracy costs" in page and page.count("<circle") >= len(found.trials)
    assert "max_drop 0.02: kept" in str(found) and found.to_dict()["met"] is True


def test_what_a_kernel_runs_beside_its_layer_is_timed_with_it() -> None:
    """Kernels have the name of the last node that they run, here a hard-swish of no unit."""
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Hardswish(), nn.Conv2d(16, 16, 3)).eval()
    data = [torch.randn(2, 16, 24, 24)]
    found = backquant.search(
        model,
        data,
        "x86",
        budget={"min_sqnr": 1},
        times=None,
        qconfig_mapping=backquant.default_mapping("x86").set_object_type(nn.Hardswish, None),
    )
    assert any("(hardswish" in kernel.kernel for kernel in found.model.kernels)
    integers = next(trial for trial in found.trials if all(trial.picks))
    assert all(integers.unit_us)


def test_without_times_bits_are_counted(net: Any) -> None:
    model, data = net
    found = backquant.search(model, data, "tensorrt", budget={"min_sqnr": 30}, times=None)
    assert found.met and found.best.ms is None and found.best.loss <= 1e-3
    wholes = [trial for trial in found.trials if not trial.misses(found.budget)]
    assert found.best.bitops == min(trial.bitops for trial in wholes)
    small = backquant.search(model, data, "tensorrt", budget={"max_bytes": 6000}, times=None)
    assert small.met and small.best.bytes <= 6000 < found.trials[0].bytes
    none = backquant.search(model, data, "tensorrt", budget={"max_bytes": 10}, times=None)
    assert not none.met and "max_bytes 10 is not kept" in none.hindrance
    assert "NOT kept" in str(none) and "in the way" in none.to_html()


def test_a_model_is_timed_in_the_runtime_that_it_is_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strategy, "MOST", 0)
    made = torch.Generator().manual_seed(0)
    model, data = nn.Sequential(nn.Linear(64, 64)).eval(), [torch.randn(16, 64, generator=made)]
    found = backquant.search(model, data, "onnxruntime", budget={"min_sqnr": 20}, times=None)
    assert (
        found.met and found.best.loss <= 1e-2 and found.model.backend_config.name == "onnxruntime"
    )
    assert all(trial.ms and trial.float_ms for trial in found.trials)
    known = [row for row in found.rows if row.float_us]
    assert known and len(found.trials) <= 3


def test_the_answer_has_the_corrections_of_the_default() -> None:
    """Biases, as `quantize` corrects them; where a layer is left in float it keeps its own."""
    torch.manual_seed(0)
    filters = [nn.Sequential(nn.Conv2d(32, 32, 3, groups=32), nn.ReLU()) for _ in range(4)]
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8)
    model = nn.Sequential(nn.Conv2d(3, 32, 1), nn.ReLU(), *filters, *ends).eval()
    data = [torch.rand(4, 3, 24, 24) for _ in range(6)]

    def searched(recipe: Any) -> Any:
        budget = {"min_sqnr": 3}
        return backquant.search(
            model, data, "tensorrt", budget=budget, calibration=data, recipe=recipe
        )

    corrected, plain = searched("default"), searched("none")
    assert any(note.startswith("recipe: biases: ") for note in corrected.model.report.notes)
    assert corrected.best.loss < 0.7 * plain.best.loss
    gained = corrected.model.report.extras["recipe"]["gained"]
    assert [one["step"] for one in gained] == ["biases"]


def test_ctrl_c_gives_the_best_so_far(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = net

    def stopped(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(strategy.Loop, "run", stopped)
    found = backquant.search(model, data, budget={"min_sqnr": 20}, times=None)
    assert found.stopped == "ctrl-C" and found.met and len(found.trials) == 2
    monkeypatch.setattr(strategy.Loop, "run_ends", stopped)
    with pytest.raises(KeyboardInterrupt):
        backquant.search(model, data, budget={"min_sqnr": 20}, times=None)


def test_a_metric_that_fails_late_leaves_the_best_so_far(net: Any) -> None:
    model, data = net
    metric, calls = nearness(model, data), [0]

    def fails_late(other: nn.Module) -> float:
        calls[0] += 1
        if calls[0] > 4:  # float, random outputs, all in float, all on integers
            raise RuntimeError("the labels are gone")
        return metric(other)

    found = backquant.search(model, data, budget={"max_drop": 1e-4}, metric=fails_late, times=None)
    assert found.met
    assert found.interrupted
    assert len(found.trials) == 2
    assert found.stopped.startswith("the metric raised RuntimeError: the labels are gone")
    assert "stopped: the metric raised" in str(found)
    assert "Stopped before its end: the metric raised" in found.to_html()
    assert found.to_dict()["stopped"] == found.stopped


def raising(model: nn.Module) -> float:
    raise RuntimeError("no labels\nat all")


BAD: dict[str, dict[str, Any]] = {
    "no_metric": {"budget": {"max_drop": 0.1}},
    "raises": {"budget": {"max_drop": 0.1}, "metric": raising},
    "nan": {"budget": {"max_drop": 0.1}, "metric": lambda model: math.nan},
    "nothing": {"budget": {"max_drop": 0.1}, "metric": lambda model: None},
    "pair": {"budget": {"max_drop": 0.1}, "metric": lambda model: torch.ones(2)},
    "text": {"budget": {"max_drop": 0.1}, "metric": lambda model: "0.5"},
    "no_times": {"budget": {"max_ms": 1.0}, "backend": "tensorrt"},
    "random": {"budget": {"max_drop": 0.1}, "metric": lambda model: 0.5},
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_searched(net: Any, name: str) -> None:
    model, data = net
    with pytest.raises(UsageError) as error:
        backquant.search(model, data, times=None, **{"budget": {"max_ms": 1.0}, **BAD[name]})
    words = str(error.value).replace("<lambda>", "metric")
    snapshot(Path(__file__), name, re.sub(rf"{re.escape(__file__)}:\d+", "FILE:LINE", words))


def test_data_that_run_out(net: Any) -> None:
    model, data = net
    used_up = iter(data)
    assert len(list(used_up)) == len(data)
    with pytest.raises(CalibrationError, match="empty, or an iterator that was used up before"):
        backquant.search(model, used_up, budget={"min_sqnr": 20}, times=None)
    with pytest.raises(CalibrationError, match="the set 'data' is empty"):
        backquant.search(model, [], budget={"min_sqnr": 20}, times=None, calibration=data)
    found = backquant.search(model, iter(data), "tensorrt", budget={"min_sqnr": 10}, times=None)
    assert found.met  # calibrated on and judged by what an iterator gives once


class Logarithm(nn.Module):
    """Values near zero become zeros on integers, and their logarithms infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.b(torch.relu(self.a(x))))
        return torch.log(torch.max_pool1d(x, 4))


def test_outputs_that_are_infinite_are_no_answer() -> None:
    made = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Logarithm().eval()
    data = [torch.randn(64, 16, generator=made) for _ in range(3)]
    quantized = backquant.quantize(model, calibration=data, slower="keep")
    assert any((quantized(x).isinf() & ~model(x).isinf()).any() for x in data)
    assert backquant.compare(model, quantized, data).sqnr == -math.inf
    found = backquant.search(model, data, budget={"min_sqnr": 20}, times=None)
    assert found.met and all(torch.equal(found.model(x).isinf(), model(x).isinf()) for x in data)
    found = backquant.search(model, data, budget={"max_bytes": 1}, times=None)
    assert not found.met and all(math.isfinite(trial.loss) for trial in found.trials)


def test_data_with_nan_are_refused(net: Any) -> None:
    model, data = net
    bad = [data[0], data[0].clone().fill_(math.nan)]
    with pytest.raises(CalibrationError, match="input 'x' of batch 1 holds 3456 NaN"):
        backquant.sensitivity(model, data=bad, calibration=data)
    quantized = backquant.quantize(model, calibration=data)
    with pytest.raises(CalibrationError, match="input 'x' of batch 1 holds 3456 NaN"):
        backquant.compare(model, quantized, bad)


def test_a_state_of_something_else(net: Any, tmp_path: Path) -> None:
    model, data = net
    path = tmp_path / "state.json"
    for name, text in {
        "no_state": "{}",
        "other": '{"of": "", "losses": {}, "trials": []}',
    }.items():
        path.write_text(text)
        with pytest.raises(UsageError) as error:
            backquant.search(model, data, budget={"min_sqnr": 20}, times=None, resume=path)
        snapshot(Path(__file__), name, str(error.value).replace(str(tmp_path), "DIR"))


def _searched(names: dict[str, Any], **more: Any) -> None:
    """With a metric that tells the float model from outputs in random order, and is a finite number."""
    model, data = names["net"]
    wanted = [model(batch) for batch in data]

    def metric(one: Any) -> float:
        pairs = zip(data, wanted, strict=True)
        return -float(sum((one(x) - y).square().mean() for x, y in pairs))

    backquant.search(model, data, times=None, budget={"max_drop": 0.5}, metric=metric, **more)


BY_HAND = {
    **dict.fromkeys(["metric=", "a metric"], lambda _, n: _searched(n)),
    "resume=": lambda _, n: _searched(n, resume=n["tmp_path"] / "new.json"),
}
