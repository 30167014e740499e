"""Calls in place in a trace: later readers read the changed value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import backquant
from backquant.errors import CaptureError
from backquant.graph import capture


class Discards(nn.Module):
    """Changes its values in place and reads them under their old names."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.one, self.two = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        if self.change == "module":
            self.relu(y)
        elif self.change == "function":
            F.relu(y, inplace=True)
        elif self.change == "position":
            F.leaky_relu(y, 0.1, True)
        elif self.change == "overload":
            torch.relu_(y)
        else:
            y.clamp_(min=0)
        return self.two(y) + y[:, :, 1:-1, 1:-1]


@pytest.mark.parametrize("change", ["module", "function", "position", "overload", "method"])
def test_the_changed_value_is_read(change) -> None:
    torch.manual_seed(0)
    model, x = Discards(change).eval(), torch.randn(2, 3, 8, 8)
    wanted = model(x).detach()
    captured = capture(model).module
    assert torch.equal(captured(x), wanted)
    names = [node.name for node in captured.graph.nodes if node.op.startswith("call")]
    readers = next(n for n in captured.graph.nodes if n.name == names[1]).users
    assert [reader.name for reader in readers] == ["two", "getitem"]
    quantized = backquant.quantize(model, x, backend="onnxruntime", calibration=[x])
    noise = (quantized(x) - wanted).square().sum()
    assert 10 * torch.log10(wanted.square().sum() / noise) > 30


def test_a_graph_without_later_readers_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1))
    nodes = [(n.name, str(n.args)) for n in capture(model).module.graph.nodes]
    plain = [(n.name, str(n.args)) for n in torch.fx.symbolic_trace(model).graph.nodes]
    assert nodes == plain


class Named(nn.Module):
    """A value under two names, changed under one of them."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change
        self.conv, self.drop, self.same = nn.Conv2d(3, 4, 3), nn.Dropout(), nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        other = y
        z = self.change(self, y)
        return other * 2 + z


def _added(_: Named, y: torch.Tensor) -> torch.Tensor:
    y += 1.0
    return y


def _halved(_: Named, y: torch.Tensor) -> torch.Tensor:
    y /= 2.0
    return y * 3


def _multiplied(_: Named, y: torch.Tensor) -> torch.Tensor:
    z = y
    z *= torch.sigmoid(y)
    return y


@pytest.mark.parametrize("change", [_added, _halved, _multiplied])
def test_augmented_assignments_change_the_tensor(change) -> None:
    model, x = Named(change).eval(), torch.randn(2, 3, 8, 8)
    captured = capture(model)
    assert torch.equal(captured.module(x), model(x)) and captured.lost_change == ""
    mapping = backquant.get_default_qconfig_mapping("x86")
    prepared = backquant.prepare_fx(model, mapping, x, backend_config="x86")
    assert torch.allclose(prepared(x), model(x), atol=1e-5)


def test_numbers_get_a_new_value() -> None:
    def forward(self: Named, y: torch.Tensor) -> torch.Tensor:
        height = y.shape[2]
        double = height
        double += height
        count = y.size(1)
        count *= 2
        return y.reshape(y.shape[0], -1, height) * (double / count)

    class Sizes(Named):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self, self.conv(x))

    model, x = Sizes(None).eval(), torch.randn(2, 3, 8, 8)
    captured = capture(model)
    assert torch.equal(captured.module(x), model(x)) and captured.lost_change == ""


@pytest.mark.parametrize(
    "change",
    [
        lambda m, y: m.relu(m.drop(y)),
        lambda m, y: m.relu(m.same(y)),
        lambda m, y: m.drop(y).add_(1.0),
        lambda m, y: y.transpose(2, 3).sigmoid_().transpose(2, 3),
    ],
)
def test_a_change_under_another_name_is_captured_by_export(change) -> None:
    torch.manual_seed(0)
    model, x = Named(change).eval(), torch.randn(2, 3, 8, 8)
    assert capture(model).lost_change
    quantized = backquant.quantize(model, x, backend="x86", calibration=[x], slower="keep")
    wanted = model(x).detach()
    noise = (quantized(x) - wanted).square().sum()
    assert 10 * torch.log10(wanted.square().sum() / noise) > 30


class Doubles(nn.Module):
    """Changes a part of its value in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).mean((2, 3))
        y[:, :4].mul_(8.0)
        return self.fc(y)


def test_a_changed_view_is_captured_by_export() -> None:
    torch.manual_seed(0)
    model, x = Doubles().eval(), torch.randn(2, 3, 8, 8)
    assert capture(model).lost_change == "mul_"
    quantized = backquant.quantize(model, x, backend="onnxruntime", calibration=[x])
    assert "captured by torch.export" in str(quantized.report)
    wanted = model(x).detach()
    noise = (quantized(x) - wanted).square().sum()
    assert 10 * torch.log10(wanted.square().sum() / noise) > 30


class Written(nn.Module):
    def __init__(self, write) -> None:
        super().__init__()
        self.write = write

    def forward(self, x):
        return self.write(x)


def masked(x):
    mask = torch.zeros(x.shape)
    mask[:, 0] = 1
    mask[0, 1:] = x[0, 1:] * 2
    mask[x > 0] = 3.0
    return mask + x


def by_rows(x):
    y = x * len(x)
    y[1] = y[0]
    y[torch.tensor([0, 2]), 1] = torch.ones(2)
    y[:2, :2] = torch.eye(2)
    same = y
    same[2] = -1
    return y.relu() + same


@pytest.mark.parametrize("write", [masked, by_rows])
def test_items_that_are_assigned_are_read_later(write) -> None:
    """As windows of attention are marked (monai's SwinUNETR): "does not support item assignment"."""
    model, x = Written(write), torch.randn(3, 4)
    captured = capture(model, example_inputs=(x,))
    assert captured.lost_change == ""
    captured.module.recompile()
    for each in (x, torch.randn(3, 4)):
        assert torch.equal(captured.module(each.clone()), model(each.clone()))


def test_items_of_a_view_are_a_lost_change() -> None:
    def of_a_row(x):
        y = x * len(x)
        y[0][1] = 5.0
        return y

    x = torch.randn(3, 4)
    assert capture(Written(of_a_row), example_inputs=(x,)).lost_change == "put"
    model = nn.Sequential(nn.Linear(4, 4), Written(of_a_row))
    mapping = backquant.get_default_qat_qconfig_mapping("x86")
    with pytest.raises(CaptureError, match="'put' changes a tensor in place"):
        backquant.prepare_qat_fx(model, mapping, x)


class Routed(nn.Module):
    """As the routers of transformers' mixtures write it: of two results one is changed, and both are read."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares, chosen = torch.topk(x.softmax(-1), 2, dim=-1)
        shares /= shares.sum(dim=-1, keepdim=True)
        return shares, chosen


def test_results_of_one_call_have_memory_of_their_own() -> None:
    captured, x = capture(Routed()), torch.randn(3, 5)
    assert captured.lost_change == ""
    for made, wanted in zip(captured.module(x), Routed()(x), strict=True):
        assert torch.equal(made, wanted)


@pytest.mark.filterwarnings("ignore")
def test_items_that_are_assigned_are_exported_and_saved(tmp_path) -> None:
    """Neither ONNX nor a saved model has ``torch.put``."""
    x = torch.randn(3, 4)
    model = nn.Sequential(nn.Linear(4, 4), Written(by_rows), nn.Linear(4, 4)).train()
    mapping = backquant.get_default_qat_qconfig_mapping("onnxruntime")
    prepared = backquant.prepare_qat_fx(model, mapping, x, backend_config="onnxruntime")
    prepared(x)
    quantized = backquant.convert_fx(prepared.eval())
    backquant.save(quantized, tmp_path / "model.bq")
    assert torch.equal(backquant.load(tmp_path / "model.bq")(x), quantized(x))
    backquant.export(quantized, tmp_path / "model.onnx")
    assert "ScatterElements" in (tmp_path / "model.onnx").read_bytes().decode("latin-1")


class MadeByForward(nn.Module):
    """Writes its values into a tensor that forward makes: one constant of a trace, for all calls."""

    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__()
        self.conv, self.write = nn.Conv2d(3, 4, 3), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, z = self.conv(x), torch.zeros(2, 4, 6, 6)
        self.write(z, y)
        return z


def _by_parts(z: torch.Tensor, y: torch.Tensor) -> None:
    z[:, :2] = y[:, 2:]
    z[:, 2:] = y[:, :2]


@pytest.mark.parametrize(
    "write",
    [
        _by_parts,
        lambda z, y: z.copy_(y),
        lambda z, y: z.add_(y),
        lambda z, y: z[:, :4].add_(y),
        lambda z, y: z.index_copy_(1, torch.arange(4), y),
        lambda z, y: torch.add(y, 1.0, out=z),
    ],
)
@pytest.mark.parametrize("flow", ["quantize", "fx"])
def test_what_is_written_into_a_tensor_of_forward_is_no_constant(write, flow: str) -> None:
    """It was silent: the graph was that constant alone, 3 dB on every input."""
    torch.manual_seed(0)
    model = MadeByForward(write).eval()
    data = [torch.randn(2, 3, 8, 8) for _ in range(3)]
    assert capture(model).lost_change
    if flow == "quantize":
        made = backquant.quantize(model, calibration=data, backend="tensorrt")
    else:
        mapping = backquant.default_mapping("tensorrt")
        config = backquant.get_backend_config("tensorrt")
        prepared = backquant.prepare_fx(model, mapping, (data[0],), backend_config=config)
        for x in data:
            prepared(x)
        made = backquant.convert_fx(prepared)
    for x in data:
        with torch.no_grad():
            wanted = model(x)
            noise = (made(x) - wanted).square().sum()
        assert 10 * torch.log10(wanted.square().sum() / noise) > 30
