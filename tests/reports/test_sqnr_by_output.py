"""What is lost in one output, or in one part of it, is said first: of heads, masks, embeddings, logits."""

from __future__ import annotations

import json
from collections.abc import Callable
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
