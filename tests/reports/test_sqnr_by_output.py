"""What is lost in one output, or in one part of it, is said first: of heads, masks, embeddings, logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant

DATA = [torch.randn(2, 8, generator=torch.Generator().manual_seed(s)) for s in range(5)]
BACKENDS = ["tensorrt", "x86", "onnxruntime", "xnnpack"]


class Heads(nn.Module):
    """Two heads; a channel that nothing reads takes the steps of what the second one reads."""

    def __init__(self, join: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.good, self.loud, self.lost = nn.Linear(8, 4), nn.Linear(8, 16), nn.Linear(16, 4)
        with torch.no_grad():
            self.loud.weight[0] *= 3000
            self.lost.weight[:, 0] = 0
        self.join = join

    def forward(self, x: torch.Tensor) -> Any:
        return self.join(self.good(x), self.lost(self.loud(x)))


def _boxes_and_scores(boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.cat([boxes * 400, torch.sigmoid(scores)], 1)


SEVERAL: dict[str, Callable[..., Any]] = {
    "tuple": lambda one, two: (one, two),
    "dict": lambda one, two: {"boxes": one, "scores": two},
    "nested": lambda one, two: ([one], (two, one.shape)),
    "classes beside": lambda one, two: (one, two, two.argmax(-1)),
    "sizes of one output": lambda one, two: (one.repeat(1, 9), two),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_an_output_that_is_lost_is_said_first(name: str) -> None:
    made = backquant.quantize(
        Heads(SEVERAL[name]).eval(), calibration=DATA, backend="tensorrt", slower="keep"
    )
    outputs = made.record.figures.outputs
    assert outputs["output 0"] > 30 and outputs["output 1"] < 10
    first = made.plan.notes[0]
    assert first.startswith("little is left of output 1: SQNR ")
    assert "lowest" in str(made.report) and "at output 1" in str(made.report)
    data = json.loads(json.dumps(made.report.to_dict()))
    assert type(made.report).from_dict(data).figures.outputs == outputs


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_fix_of_the_note_works(backend: str) -> None:
    model = Heads(SEVERAL["tuple"]).eval()
    made = backquant.quantize(model, calibration=DATA, backend=backend, slower="keep")
    first, lost = made.plan.notes[0], made.record.figures.outputs["output 1"]
    assert first.startswith("little is left of output 1")
    code = first.partition("qconfig_mapping=")[2]
    mapping = eval(code, {"backquant": backquant})
    again = backquant.quantize(
        model, calibration=DATA, backend=backend, qconfig_mapping=mapping, slower="keep"
    )
    assert again.record.figures.outputs["output 1"] > lost


def test_a_joined_part_that_is_lost() -> None:
    mapping = backquant.get_default_qconfig_mapping("tensorrt")
    mapping.set_object_type(torch.cat, mapping.global_qconfig)
    model = Heads(_boxes_and_scores).eval()
    with torch.no_grad():
        model.loud.weight[0] /= 3000
    made = backquant.quantize(model, calibration=DATA, backend="tensorrt", qconfig_mapping=mapping)
    outputs = made.record.figures.outputs
    assert outputs["output 0"] > 30 and outputs["output 0, part 1 of 'cat'"] < 10
    assert "set_object_type(torch.cat, None)" in made.plan.notes[0]
    mapping.set_object_type(torch.cat, None)
    made = backquant.quantize(model, calibration=DATA, backend="tensorrt", qconfig_mapping=mapping)
    assert made.record.figures.outputs["output 0, part 1 of 'cat'"] > 30
    assert not any(note.startswith("little is left") for note in made.plan.notes)


def test_integers_at_the_edges_are_compared_by_value() -> None:
    model = Heads(SEVERAL["tuple"]).eval()
    with torch.no_grad():
        model.loud.weight[0] /= 3000
    made = backquant.quantize(model, calibration=DATA, backend="onnxruntime", integer_io=True)
    assert min(made.record.figures.outputs.values()) > 25


def _joined() -> tuple[nn.Module, backquant.QuantizedModel]:
    model = Heads(_boxes_and_scores).eval()
    with torch.no_grad():
        model.loud.weight[0] /= 3000
    mapping = backquant.get_default_qconfig_mapping("onnxruntime")
    return model, backquant.quantize(
        model, calibration=DATA, backend="onnxruntime", qconfig_mapping=mapping
    )


def test_a_comparison_has_joined_parts() -> None:
    model, made = _joined()
    [output] = backquant.compare(model, made, DATA).outputs
    assert output.join == "cat" and [part.position for part in output.parts] == [0, 1]
    assert min(part.sqnr for part in output.parts) > 25
    for part, columns in zip(output.parts, (slice(0, 4), slice(4, 8)), strict=True):
        wanted, found = (
            torch.cat([one(batch)[:, columns] for batch in DATA]).detach() for one in (model, made)
        )
        by_hand = 20 * torch.log10(wanted.norm() / (wanted - found).norm())
        assert part.sqnr == pytest.approx(float(by_hand), abs=0.2)
    assert "parts of cat: " in str(backquant.compare(model, made, DATA))


def test_an_export_says_how_near_each_output_and_part_is(tmp_path: Path) -> None:
    _, made = _joined()
    exported = backquant.export(made, tmp_path / "model.onnx")
    names = ["output 0", "output 0, part 0 of 'cat'", "output 0, part 1 of 'cat'"]
    assert list(exported.sqnr) == names and min(exported.sqnr.values()) > 10
    assert f"{names[2]}: SQNR {exported.sqnr[names[2]]:.1f} dB" in "\n".join(exported._lines())
    assert exported.to_dict()["sqnr"] == exported.sqnr


@pytest.mark.parametrize("name", SEVERAL)
def test_a_loaded_model_keeps_what_was_measured(name: str, tmp_path: Path) -> None:
    model = Heads(SEVERAL[name]).eval()
    made = backquant.quantize(model, calibration=DATA, backend="onnxruntime", slower="keep")
    backquant.save(made, tmp_path / "model.bq")
    loaded = backquant.load(tmp_path / "model.bq")
    assert loaded.report.figures.outputs == made.report.figures.outputs != {}
    assert loaded.record.measured_outputs == made.record.measured_outputs


def test_a_loaded_model_is_exported_with_integers_at_outputs_left_in_float(tmp_path: Path) -> None:
    """The last layer gives floats, since nothing quantized reads it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    made = backquant.quantize(model, calibration=DATA, backend="onnxruntime", slower="keep")
    backquant.save(made, tmp_path / "model.bq")
    paths = tmp_path / "one.onnx", tmp_path / "two.onnx"
    for one, path in zip((made, backquant.load(tmp_path / "model.bq")), paths, strict=True):
        exported = backquant.export(one, path, integer_io=True)
        assert set(exported.edges) == {"input", "output 0"}
    assert paths[0].read_bytes() == paths[1].read_bytes()


FOLLOWERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "product": lambda y: y * 0.5,
    "bounds": lambda y: nn.functional.hardtanh(y, 0, 4000),
    "sum": lambda y: y + y,
    "two": lambda y: torch.relu(y) * 2,
}


@pytest.mark.parametrize("follower", FOLLOWERS)
def test_a_part_that_is_lost_is_seen_through_what_follows_the_join(follower: str) -> None:
    keeps = FOLLOWERS[follower]
    model = Heads(lambda one, two: keeps(_boxes_and_scores(one, two))).eval()
    with torch.no_grad():
        model.loud.weight[0] /= 3000
    mapping = backquant.get_default_qconfig_mapping("tensorrt")
    for kind in (torch.cat, torch.relu, torch.mul, torch.add, nn.functional.hardtanh):
        mapping.set_object_type(kind, mapping.global_qconfig)
    made = backquant.quantize(model, calibration=DATA, backend="tensorrt", qconfig_mapping=mapping)
    assert made.record.figures.outputs["output 0, part 1 of 'cat'"] < 10
    assert made.plan.notes[0].startswith("little is left of output 0, part 1")
    code = made.plan.notes[0].partition("qconfig_mapping=")[2]
    again = eval(code, {"backquant": backquant, "torch": torch})
    made = backquant.quantize(model, calibration=DATA, backend="tensorrt", qconfig_mapping=again)
    assert made.record.figures.outputs["output 0, part 1 of 'cat'"] > 20
