"""Parts of stock models that no road took once: bags of indices, uneven pooling, transposed convolutions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import backquant
from backquant.deploy import find_target
from backquant.errors import ExportError, InputError


def run(path: Path, *inputs: torch.Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
    return session.run(None, feed)[0]


class Recommender(nn.Module):
    """As DLRM: bags of indices with their offsets, and tables of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 16, mode="sum")
        self.few, self.many = nn.Embedding(8, 16), nn.Embedding(124, 16)
        self.top = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, pairs: torch.Tensor
    ) -> torch.Tensor:
        parts = self.bag(indices, offsets), self.few(pairs[:, 0]), self.many(pairs[:, 1])
        return self.top(torch.cat(parts, 1))


def recommendations() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    few = torch.randint(0, 8, (4,), generator=generator)
    many = torch.randint(100, 124, (4,), generator=generator)
    indices = torch.randint(0, 50, (12,), generator=generator)
    return indices, torch.tensor([0, 3, 5, 9]), torch.stack((few, many), 1)


def test_indices_and_offsets_are_exported_as_given(tmp_path) -> None:
    torch.manual_seed(0)
    inputs = recommendations()
    quantized = backquant.quantize(
        Recommender().eval(), inputs, backend="onnxruntime", calibration=[inputs]
    )
    backquant.save(quantized, tmp_path / "m.bq")
    again = backquant.load(tmp_path / "m.bq")
    for kept, given in zip(again.example.arguments()[0], inputs, strict=True):
        assert torch.equal(kept, given)
    exported = backquant.export(again, tmp_path / "m.onnx")
    assert exported.integer_share == 1.0
    found = run(tmp_path / "m.onnx", *inputs)
    assert np.abs(found - quantized(*inputs).numpy()).max() < 0.02


@pytest.mark.parametrize(("backend", "name"), [("openvino", "m.xml"), ("xnnpack", "m.pte")])
def test_bags_go_to_other_runtimes(backend, name, tmp_path) -> None:
    torch.manual_seed(0)
    inputs = recommendations()
    quantized = backquant.quantize(
        Recommender().eval(), inputs, backend=backend, calibration=[inputs]
    )
    exported = backquant.export(quantized, tmp_path / name)
    assert exported.integer_share == 1.0


class Bessel(nn.Module):
    """A function that no runtime of a file has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(self.first(x))


@pytest.mark.parametrize(("backend", "name"), [("openvino", "m.xml"), ("xnnpack", "m.pte")])
def test_a_limit_of_the_target_is_an_error_of_ours(backend, name, tmp_path) -> None:
    x = torch.randn(4, 8)
    quantized = backquant.quantize(Bessel().eval(), x, backend=backend, calibration=[x])
    with pytest.raises(ExportError, match="bessel_j0"):
        backquant.export(quantized, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_example_inputs_that_do_not_run_are_named(tmp_path) -> None:
    inputs = recommendations()
    quantized = backquant.quantize(
        Recommender().eval(), inputs, backend="onnxruntime", calibration=[inputs]
    )
    wrong = (inputs[0], inputs[1], inputs[2].flip(1))
    with pytest.raises(InputError, match=r"index out of range"):
        backquant.export(quantized, tmp_path / "m.onnx", example_inputs=wrong)


@pytest.mark.parametrize("size", [(7, 7), (3, 5)])
def test_adaptive_pooling_to_sizes_that_do_not_divide(size, tmp_path) -> None:
    """vgg11's head pools maps of 2 × 2 to 7 × 7 on pictures of 64 × 64."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 10, 8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(size), nn.Conv2d(8, 4, 1))
    quantized = backquant.quantize(model.eval(), x, backend="onnxruntime", calibration=[x])
    backquant.export(quantized, tmp_path / "m.onnx")
    wanted = quantized(x).numpy()
    noise = np.square(run(tmp_path / "m.onnx", x) - wanted).sum()
    assert 10 * np.log10(np.square(wanted).sum() / noise) > 30


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_transposed_convolutions_stay_float_and_right(rank, tmp_path) -> None:
    torch.manual_seed(0)
    convolution = getattr(nn, f"Conv{rank}d")
    transposed = getattr(nn, f"ConvTranspose{rank}d")
    norm = getattr(nn, f"BatchNorm{rank}d")
    model = nn.Sequential(
        convolution(3, 8, 3),
        nn.ReLU(inplace=True),
        transposed(8, 8, 3, 2, 1, 1, groups=2),
        norm(8),
        nn.ReLU(inplace=True),
        convolution(8, 4, 1),
    ).eval()
    x = torch.randn(2, 3, *(8,) * rank)
    quantized = backquant.quantize(model, x, backend="onnxruntime", calibration=[x])
    backquant.export(quantized, tmp_path / "m.onnx", require=0.0)
    wanted = quantized(x).numpy()
    noise = np.square(run(tmp_path / "m.onnx", x) - wanted).sum()
    assert 10 * np.log10(np.square(wanted).sum() / noise) > 25


def test_the_target_of_a_suffix_is_that_of_the_backend(tmp_path) -> None:
    for backend, name in (("tensorrt", "tensorrt"), ("tensorrt_fp8", "tensorrt"), ("x86", "onnx")):
        assert find_target(None, tmp_path / "m.onnx", backend).name == name
    x = torch.randn(2, 3, 8, 8)
    quantized = backquant.quantize(nn.Conv2d(3, 4, 3), x, backend="tensorrt", calibration=[x])
    assert backquant.export(quantized, tmp_path / "m.onnx").target == "tensorrt"


@pytest.mark.parametrize("pool", [nn.AvgPool2d, nn.MaxPool2d])
def test_windows_that_ceil_mode_cuts_off(pool, tmp_path) -> None:
    """transformers' EfficientNet pools maps of any size with a window of 1280: OpenVINO refuses it."""
    import openvino

    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 9)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), pool((64, 2), ceil_mode=True), nn.Conv2d(8, 4, 1))
    quantized = backquant.quantize(model.eval(), x, backend="openvino", calibration=[x])
    backquant.export(quantized, tmp_path / "m.xml")
    compiled = openvino.Core().compile_model(str(tmp_path / "m.xml"), "CPU")
    wanted = quantized(x).numpy()
    found = compiled([x.numpy()])[0]
    assert found.shape == wanted.shape
    assert 10 * np.log10(np.square(wanted).sum() / np.square(found - wanted).sum()) > 30


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(10, 8), nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        gone = 1.0 - mask
        return self.top(self.table(tokens)) * (1 - gone).unsqueeze(-1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_masks_that_are_taken_from_a_number(dtype, tmp_path) -> None:
    """XLNet's mask, which is integers by default: the exporter ended with a raw error."""
    torch.manual_seed(0)
    inputs = torch.randint(0, 10, (2, 5)), torch.tensor([[1, 1, 1, 0, 0]] * 2).to(dtype)
    quantized = backquant.quantize(
        Masked().eval(), inputs, backend="onnxruntime", calibration=[inputs]
    )
    backquant.export(quantized, tmp_path / "m.onnx")
    found = run(tmp_path / "m.onnx", *inputs)
    assert np.abs(found - quantized(*inputs).numpy()).max() < 0.05
