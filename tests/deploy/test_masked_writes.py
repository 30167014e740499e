"""What a model writes where a boolean mask says so is a choice for each place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backquant
from backquant.deploy.job import choose_where_masked
from backquant.deploy.program import Program, export_program

X, MASK = torch.arange(24.0).view(2, 3, 4), torch.tensor([True, False, True])
ALL = X > 11.0


def write(*indices: Any) -> Any:
    """A model that writes its last input at ``indices`` of a copy of its first; ``"mask"``: its second."""

    class Write(nn.Module):
        def forward(self, x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
            given = [mask if index == "mask" else index for index in indices]
            return torch.ops.aten.index_put.default(x, given, value)

    return torch.fx.symbolic_trace(Write())


def program(module: Any, *values: Tensor) -> Program:
    return export_program(module, values, {}, None)


def calls(made: Program) -> str:
    return " ".join(str(node.target) for node in made.exported.graph.nodes)


@pytest.mark.parametrize(
    "value", [torch.tensor(-1.0), torch.tensor([-1.0]), torch.full((1, 1, 1), -1.0)]
)
@pytest.mark.parametrize(
    ("indices", "mask"),
    [
        ((None, "mask"), MASK),
        (("mask",), MASK[:2]),
        ((None, None, "mask"), torch.tensor([True, False, False, True])),
        (("mask",), ALL),
        ((None, "mask"), ALL[0]),
        (("mask",), torch.zeros(2, 3, dtype=torch.bool)),
    ],
)
def test_the_same_value_for_all_places(indices: Any, mask: Tensor, value: Tensor) -> None:
    module = write(*indices)
    wanted = module(X, mask, value)
    made = choose_where_masked(program(module, X, mask, value))
    assert "where" in calls(made)
    assert "index_put" not in calls(made)
    assert torch.equal(made.exported.module()(X, mask, value), wanted)
    assert set(made.origins.values()) == {"index_put_default"}


def test_a_row_for_all_places() -> None:
    module, row = write(None, "mask"), torch.tensor([5.0, 6.0, 7.0, 8.0])
    made = choose_where_masked(program(module, X, MASK, row))
    assert "where" in calls(made)
    assert torch.equal(made.exported.module()(X, MASK, row), module(X, MASK, row))


@pytest.mark.parametrize(
    ("indices", "mask", "value"),
    [
        ((None, "mask"), MASK, torch.arange(8.0).view(2, 1, 4)),  # a value for each sample, too
        ((None, "mask"), MASK, torch.arange(8.0).view(2, 4)),  # a row for each place
        ((None, "mask"), torch.tensor([0, 2]), torch.tensor(1.0)),  # positions, no mask
        ((torch.tensor([0, 1]), "mask"), MASK, torch.tensor(1.0)),  # pairs of places
    ],
)
def test_other_writes_stay(indices: Any, mask: Tensor, value: Tensor) -> None:
    module = write(*indices)
    made = program(module, X, mask, value)
    assert calls(choose_where_masked(made)).count("index_put") == 1
    assert torch.equal(made.exported.module()(X, mask, value), module(X, mask, value))


def test_additions_stay() -> None:
    class Add(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return torch.index_put(x, [mask], torch.tensor(1.0), accumulate=True)

    made = program(torch.fx.symbolic_trace(Add()), X, ALL)
    assert "index_put" in calls(choose_where_masked(made))


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("mask", torch.ones(6, 6, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        scores[:, self.mask] = -torch.inf
        return scores.softmax(-1) @ self.value(x)


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_runtimes_take_hidden_scores(backend: str, tmp_path: Path) -> None:
    model, x = Hides().eval(), torch.randn(2, 6, 8)
    made = backquant.quantize(model, x, backend=backend, calibration=[x], slower="keep")
    path = tmp_path / ("m.xml" if backend == "openvino" else "m.onnx")
    backquant.export(made, path, example_inputs=x)
    found = _run(path, x)
    assert torch.allclose(found, made(x), atol=0.05)
    assert torch.allclose(found[:, 0], model.value(x)[:, 0], atol=0.05)  # reads itself alone


def _run(path: Path, x: Tensor) -> Tensor:
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path))
        return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    import openvino

    hints = {"INFERENCE_PRECISION_HINT": "f32"}
    return torch.from_numpy(openvino.Core().compile_model(str(path), "CPU", hints)([x.numpy()])[0])
