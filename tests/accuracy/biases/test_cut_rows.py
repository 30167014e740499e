from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.accuracy.biases.corrected import shares
from backquant.accuracy.recipes.draft import Layer, layers_of
from backquant.accuracy.twin import Twin
from backquant.api.flow import Flow, Options

SILENT = 3
"""The channel that is hardly ever there."""


def read_by_a_large_weight(loud: bool = False) -> nn.Module:
    """A layer of which half of the rows have their largest weight where nothing comes from."""
    torch.manual_seed(0)
    first, second = nn.Conv1d(4, 16, 1), nn.Conv1d(16, 8, 3)
    with torch.no_grad():
        first.weight[SILENT], first.bias[SILENT] = 0.0, 0.0  # type: ignore[index]
        if loud:
            first.bias[SILENT] = 1.0  # type: ignore[index]
        second.weight[:4, SILENT, 1] = 30.0
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Conv1d(8, 4, 1)).eval()


def sounds(count: int, seed: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 4, 32, generator=made) for _ in range(count)]


def loss(model: nn.Module, quantized: nn.Module, data: list[torch.Tensor]) -> float:
    with torch.no_grad():
        pairs = [(model(x), quantized(x)) for x in data]
    return sum(float((b - a).square().sum() / a.square().sum()) for a, b in pairs)


def told(quantized: Any) -> list[str]:
    return [note for note in quantized.report.notes if "of weights cut" in note]


@pytest.mark.parametrize("backend", ["x86", "onnxruntime", "openvino"])
def test_rows_are_cut_where_nothing_is_read(backend: str) -> None:
    model, data = read_by_a_large_weight(), sounds(6, 1)
    options: dict[str, Any] = {"backend": backend, "calibration": data, "slower": "keep"}
    plain = backquant.quantize(model, recipe="none", **options)
    default = backquant.quantize(model, **options)
    tests = sounds(4, 2)
    assert loss(model, default, tests) < 0.3 * loss(model, plain, tests)
    assert [one.kernel for one in default.kernels] == [one.kernel for one in plain.kernels]
    note = "recipe: 4 rows of weights cut, of which the largest read next to nothing: 2"
    assert told(default) == [note] and told(plain) == []


def test_it_is_in_the_file(tmp_path: Path) -> None:
    data = sounds(4, 1)
    made = backquant.quantize(read_by_a_large_weight(), calibration=data, slower="keep")
    backquant.save(made, tmp_path / "model.bq")
    loaded = backquant.load(tmp_path / "model.bq")
    assert told(loaded) == told(made) != []
    assert torch.equal(loaded(data[0]), made(data[0]))


def test_recipes_begin_with_it() -> None:
    model, data = read_by_a_large_weight(), sounds(6, 1)
    options: dict[str, Any] = {"calibration": data, "slower": "keep"}
    only = backquant.quantize(model, recipe="default", **options)
    more = backquant.quantize(model, recipe="better", **options)
    tests = sounds(4, 2)
    assert told(more) == told(only)
    assert loss(model, more, tests) <= 1.1 * loss(model, only, tests)


def test_channels_that_say_something_are_not_cut_off() -> None:
    made = backquant.quantize(
        read_by_a_large_weight(loud=True), calibration=sounds(6, 1), slower="keep"
    )
    assert told(made) == []


def second_layer() -> Layer:
    own = Flow(Options()).calibrated(read_by_a_large_weight(), None, sounds(4, 1))
    return next(
        layer for layer in layers_of(Twin(own.prepared, own.reference())) if layer.path == "2"
    )


def test_the_share_is_that_of_the_least_loss() -> None:
    layer, squares = second_layer(), torch.ones(16, dtype=torch.float64)
    squares[SILENT] = 0.0
    found = shares(layer, squares)
    assert found is not None
    assert found[4:].tolist() == [1.0] * 4
    assert all(0.4 <= share < 0.6 for share in found[:4].tolist())


@pytest.mark.parametrize("power", [1.0, 1e-2], ids=["as others", "a tenth of their size"])
def test_what_is_there_at_times_is_not_cut_off(power: float) -> None:
    squares = torch.ones(16, dtype=torch.float64)
    squares[SILENT] = power
    assert shares(second_layer(), squares) is None


def test_layers_of_which_nothing_was_seen() -> None:
    assert shares(second_layer(), torch.zeros(16, dtype=torch.float64)) is None


def test_one_scale_for_all_rows_stays() -> None:
    layer, squares = second_layer(), torch.ones(16, dtype=torch.float64)
    squares[SILENT] = 0.0
    layer.reference.weight_scale = layer.reference.weight_scale.amax()
    assert shares(layer, squares) is None


def test_rows_of_zeros_stay() -> None:
    layer, squares = second_layer(), torch.ones(16, dtype=torch.float64)
    with torch.no_grad():
        layer.float_part.weight.zero_()
    assert shares(layer, squares) is None


def test_groups_read_channels_of_their_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 32, 1), nn.ReLU(), nn.Conv1d(32, 8, 3, groups=2)).eval()
    with torch.no_grad():
        for row in (0, 5):  # the last channel of either group
            model[2].weight[row, 15, 1] = 30.0
    own = Flow(Options()).calibrated(model, None, sounds(4, 1))
    [layer] = [one for one in layers_of(Twin(own.prepared, own.reference())) if one.path == "2"]
    squares = torch.ones(32, dtype=torch.float64)
    squares[31] = 0.0
    found = shares(layer, squares)
    assert found is not None
    assert [row for row, share in enumerate(found.tolist()) if share < 1] == [5]
