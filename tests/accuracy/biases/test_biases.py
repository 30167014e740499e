from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.accuracy.biases.corrected import corrected_biases
from backquant.accuracy.biases.layers import Seen, batches_worth, layer_calls
from backquant.accuracy.calibrated import Calibrated
from backquant.accuracy.recipes import recipe_of
from backquant.accuracy.reference_run import Plan, Run, placeholders
from backquant.api.flow import Flow, Options
from backquant.convert import reference_state
from backquant.match.plan import Reason
from backquant.prepare import prepared_state
from backquant.reason_codes import ReasonCode


def depthwise() -> nn.Module:
    """Filters of nine weights behind each other: rounding them moves the mean of what they give."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 1), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(32, 32, 3, groups=32), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8)).eval()


def images(count: int, seed: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.rand(4, 3, 24, 24, generator=made) for _ in range(count)]


def loss(model: nn.Module, quantized: nn.Module, data: list[torch.Tensor]) -> float:
    with torch.no_grad():
        pairs = [(model(x), quantized(x)) for x in data]
    return sum(float((b - a).square().sum() / a.square().sum()) for a, b in pairs)


def ready(model: nn.Module, data: list[torch.Tensor]) -> Calibrated:
    return Flow(Options(recipe="default")).calibrated(model, None, data)


@pytest.mark.parametrize("backend", ["x86", "onnxruntime", "openvino"])
def test_the_default_loses_less_on_images_that_nothing_was_fitted_on(backend: str) -> None:
    model, data, tests = depthwise(), images(6, 1), images(4, 2)
    options: dict[str, Any] = {"backend": backend, "calibration": data, "slower": "keep"}
    plain = backquant.quantize(model, recipe="none", **options)
    default = backquant.quantize(model, **options)
    again = backquant.quantize(model, **options)
    assert loss(model, default, tests) < 0.7 * loss(model, plain, tests)
    assert [one.kernel for one in default.kernels] == [one.kernel for one in plain.kernels]
    assert all(torch.equal(default(x), again(x)) for x in tests)
    [gained] = default.report.extras["recipe"]["gained"]
    assert gained["step"] == "biases" and gained["after"] > gained["before"] + 1
    assert any(note.startswith("recipe: biases: ") for note in default.report.notes)
    assert "recipe" not in plain.report.extras


def test_it_is_in_the_file(tmp_path: Path) -> None:
    model, data = depthwise(), images(4, 1)
    made = backquant.quantize(model, calibration=data, slower="keep")
    backquant.save(made, tmp_path / "model.bq")
    loaded = backquant.load(tmp_path / "model.bq")
    assert loaded.report.extras["recipe"] == made.report.extras["recipe"]
    assert torch.equal(loaded(data[0]), made(data[0]))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(lambda: images(2, 1), id="two batches"),
        pytest.param(lambda: iter(images(6, 1)), id="length not known"),
    ],
)
def test_sets_that_are_not_watched(data: Any) -> None:
    made = [
        backquant.quantize(depthwise(), calibration=data(), slower="keep", recipe=recipe)
        for recipe in ("default", [])
    ]
    x = images(1, 2)[0]
    assert torch.equal(made[0](x), made[1](x))
    assert "recipe" not in made[0].report.extras


def test_what_loses_on_the_batches_that_judge_is_not_kept() -> None:
    """The means of what layers read are those of other images: the biases that they ask for are wrong."""
    own = ready(depthwise(), images(6, 1))
    assert own.watched is not None
    fitting, judging = own.watched.fitting, own.watched.judging
    wrong = [replace(seen, reads={k: -v for k, v in seen.reads.items()}) for seen in fitting[:1]]
    kept, found = (
        corrected_biases(own.prepared, own.reference(), few, judging)
        for few in (fitting[:1], wrong)
    )
    assert kept is not None and len(kept.biases) == kept.layers == 6
    assert found is not None and found.biases == {} and found.before == found.after


def test_layers_before_a_sigmoid_can_be_left_out() -> None:
    """Large values of it do not matter, and have the largest errors."""
    own = ready(depthwise(), images(4, 1))
    calls = layer_calls(own.prepared, own.reference(), [])
    assert [call.path for call in calls.values() if call.is_last] == ["12"]


def test_layers_that_stay_float_keep_their_biases() -> None:
    own = ready(depthwise(), images(6, 1))
    corrected, reference = own.corrected(recipe_of("default"))
    assert reference is not None and len(corrected.biases) == 6
    plan = prepared_state(corrected.prepared).plan
    [last] = (i for i, match in enumerate(plan.matches) if match.root == "_12")
    reason = Reason("_12", ReasonCode.SLOWER_THAN_FLOAT, "", "")
    partly = corrected.reference({last: reason})
    first: Any = partly.get_submodule("0")[0]  # type: ignore[index]
    assert torch.equal(first.bias, corrected.biases["0"])
    assert torch.equal(partly.get_submodule("12").bias, own.frozen[12].bias)  # type: ignore[index, arg-type]
    whole = corrected.reference()
    x = images(1, 2)[0]
    with torch.no_grad():
        assert torch.equal(whole(x), reference(x))
    assert reference_state(reference).recipe["gained"]


def test_a_run_gives_the_bits_of_the_reference_model() -> None:
    own = ready(depthwise(), images(3, 1))
    reference, x = own.reference(), images(1, 2)[0]
    run = Run(reference, Plan(reference), placeholders(own.prepared, x, 0))
    with torch.no_grad():
        for node in reference.graph.nodes:
            run.step(node)
        assert torch.equal(run.output(), reference(x))
    assert set(run.values) == {"output"}


def test_a_batch_is_watched_without_hooks_behind_it() -> None:
    own = ready(depthwise(), images(8, 1))
    assert own.watched is not None
    seen: list[Seen] = [*own.watched.fitting, *own.watched.judging]
    assert len(own.watched.judging) >= 1 and all(one.outputs for one in seen)
    assert not any(module._forward_hooks for module in own.prepared.modules())
    mean = seen[0].batch.mean((0, 2, 3))
    assert torch.allclose(seen[0].reads["0"].float(), mean)


def test_how_many_batches_are_watched() -> None:
    """The more there are the more are worth it; of batches much larger than the example fewer."""
    prepared = ready(depthwise(), images(3, 1)).prepared
    worth = [batches_worth(prepared, count, 1.0) for count in (1, 3, 8, 100)]
    assert worth == [(0, 0), *sorted(worth[1:])] and (0, 0) < worth[1] < worth[3] == (8, 2)
    assert batches_worth(prepared, 3, 1e6) == (0, 0)


@pytest.mark.parametrize("recipe", ["default", ["bias-correction"]])
def test_a_model_that_gives_one_number_for_each_row(recipe: Any) -> None:
    """As those of torchfm do: their outputs have one dimension."""
    model = nn.Sequential(*depthwise(), nn.Linear(8, 1), nn.Flatten(0)).eval()
    made = backquant.quantize(model, calibration=images(6, 1), slower="keep", recipe=recipe)
    assert made.report.extras["recipe"]["gained"][0]["proposed"] == 7
    assert made(images(1, 2)[0]).shape == (4,)


class Named(nn.Module):
    """Its last layer has the name that a graph gives to what is returned (pytorchcv's models)."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Conv2d(3, 8, 3)
        self.relu = nn.ReLU()
        self.middle = nn.Conv2d(8, 8, 3)
        self.output = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.relu(self.input(x)))
        result: torch.Tensor = self.output(x.mean([2, 3]))
        return result


def test_a_layer_called_output() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(8, 3, 8, 8) for _ in range(4)]
    model = Named().eval()
    quantized = backquant.quantize(model, calibration=batches, slower="keep")
    wanted = model(batches[0])
    assert (wanted - quantized(batches[0])).square().sum() < 0.01 * wanted.square().sum()
