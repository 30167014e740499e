from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import backquant
from backquant.deploy.session import (
    load_exported,
    resized,
    row_major,
    twice_if_allowed,
    two_for_one,
)


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        ({"x": {0: "batch"}}, (2, 1, 3)),
        ({"x": {0: torch.export.Dim.AUTO, 1: "n"}}, (2, 2, 3)),
        ({"x": {-2: "n"}}, (1, 2, 3)),
        (({0: "batch"},), (2, 1, 3)),
        ({"x": {2: "free already"}}, (1, 1, 3)),
        ({"x": {0: torch.export.Dim.STATIC}}, (1, 1, 3)),
        ({"x": {0: 1, 1: None, 7: "no such axis"}}, (1, 1, 3)),
        ({"y": {0: "batch"}}, (1, 1, 3)),
        ({"x": None}, (1, 1, 3)),
        (None, (1, 1, 3)),
    ],
)
def test_axes_of_free_size(shapes: Any, size: tuple[int, ...]) -> None:
    x = torch.randn(1, 1, 3)
    args, kwargs = resized((x,), {}, shapes, ["x"], two_for_one)
    assert args[0].shape == size and kwargs == {}
    if not isinstance(shapes, tuple):
        args, kwargs = resized((), {"x": x}, shapes, [], two_for_one)
        assert kwargs["x"].shape == size and args == ()


class Pair(NamedTuple):
    one: Any
    two: Any


def test_named_tuples_stay_what_they_are() -> None:
    pair, shapes = Pair(torch.ones(1, 3), [torch.ones(1, 2)]), Pair({0: "batch"}, [{0: "batch"}])
    for given in (shapes, list(shapes)):
        [grown], _ = resized((pair,), {}, {"p": given}, ["p"], two_for_one)
        assert type(grown) is Pair
        assert (grown.one.shape, grown.two[0].shape) == ((2, 3), (2, 2))


@pytest.mark.parametrize(
    ("label", "size"),
    [
        ("n", 6),
        ("n<=6", 6),
        ("n<=5", 3),
        (torch.export.Dim("n", max=5), 3),
        (torch.export.Dim("n"), 6),
        (torch.export.Dim.AUTO, 6),
        (torch.export.Dim.STATIC, 3),
        (None, 3),
    ],
)
def test_twice_the_free_sizes(label: Any, size: int) -> None:
    [grown], _ = resized((torch.ones(3, 2),), {}, {"x": {0: label}}, ["x"], twice_if_allowed)
    assert grown.shape == (size, 2)


def test_a_model_quantized_with_one_sample_at_a_time(tmp_path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5)).eval()
    batches = [torch.randn(1, 3, 5, 5) for _ in range(4)]
    quantized = backquant.quantize(model, backend="onnxruntime", calibration=batches)
    path = tmp_path / "model.onnx"
    backquant.export(quantized, path, dynamic_shapes={"input": {0: "batch"}})
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (1, 2, 7):
        x = torch.randn(batch, 3, 5, 5)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert found.shape == (batch, 5)
        assert (torch.from_numpy(found) - quantized(x)).abs().max() < 0.05


ORDERS = {
    "channels-last": torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
    "transposed": torch.randn(16, 4).t(),
    "axis-of-one": torch.randn(1, 4, 16).transpose(0, 1),
    "every-second": torch.randn(4, 32)[:, ::2],
    "expanded": torch.randn(1, 16).expand(4, 16),
}


@pytest.mark.parametrize("order", ORDERS)
def test_row_major(order: str) -> None:
    x = ORDERS[order]
    made = row_major(x)
    assert made.stride() == torch.empty(x.shape).stride() and torch.equal(made, x)
    assert row_major(made) is made


def layer_for(x: torch.Tensor) -> nn.Module:
    torch.manual_seed(0)
    return (nn.Conv2d(3, 4, 3) if x.dim() == 4 else nn.Linear(16, 16)).eval()


@pytest.mark.parametrize("order", ORDERS)
def test_xnnpack_and_the_order_of_the_example(order: str, tmp_path) -> None:
    """XNNPACK had other sizes than the model: channels last gave wrong numbers, the rest was refused."""
    x, path = ORDERS[order], tmp_path / "m.pte"
    quantized = backquant.quantize(layer_for(x), backend="xnnpack", calibration=[x])
    backquant.export(quantized, path, example_inputs=x)
    loaded = load_exported(path, 1)
    for given in (x, x.contiguous()):
        (found,) = loaded.run([given])
        torch.testing.assert_close(torch.as_tensor(found), quantized(x), atol=0.03, rtol=0)


@pytest.mark.parametrize("order", ["channels-last", "every-second"])
def test_inductor_and_the_order_of_the_example(order: str, tmp_path) -> None:
    """Channels last in the example gave wrong numbers for images as they are, every second value none."""
    x, path = ORDERS[order], tmp_path / "m.pt2"
    quantized = backquant.quantize(layer_for(x), backend="inductor_x86", calibration=[x])
    backquant.export(quantized, path, example_inputs=x)
    found = torch._inductor.aoti_load_package(str(path))(x.contiguous())
    torch.testing.assert_close(found, quantized(x), atol=0.03, rtol=0)
    (found,) = load_exported(path, 1).run([np.asarray(x)])
    torch.testing.assert_close(torch.as_tensor(found), quantized(x), atol=0.03, rtol=0)
