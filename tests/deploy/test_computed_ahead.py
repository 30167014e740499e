"""Products that depend on no input are constants in files of fixed sizes."""

from __future__ import annotations

import torch
from torch import nn

import backquant


class Queries(nn.Module):
    """Queries that are the same for each image, projected before the input is looked at."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries = nn.Parameter(torch.randn(5, 16))
        self.project, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.queries.unsqueeze(0).expand(x.shape[0], 5, 16)
        return self.last(self.project(torch.zeros_like(queries) + queries) + x)


def test_they_are_neither_run_nor_counted(tmp_path) -> None:
    x = torch.randn(2, 5, 16)
    quantized = backquant.quantize(Queries().eval(), backend="onnxruntime", calibration=[x])
    before = quantized.code
    exported = backquant.export(quantized, tmp_path / "m.onnx", example_inputs=x)
    assert exported.integer_share == 1.0
    assert "project" not in {node for use in exported.kernels for node in use.nodes}
    assert quantized.code == before


class Windows(nn.Module):
    """A mask that is written region by region, of which one is empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.new_zeros((6,))
        for number, (start, end) in enumerate(((0, -6), (-6, -2), (-2, None))):
            mask[start:end] = number
        return self.last(self.first(x) + mask.masked_fill(mask == 1, -1.0))


def test_masks_written_region_by_region_are_constants(tmp_path) -> None:
    """OpenVINO does not write into nothing."""
    x = torch.randn(2, 6)
    quantized = backquant.quantize(Windows().eval(), x, backend="openvino", calibration=[x])
    assert "slice_scatter" not in quantized.code
    exported = backquant.export(quantized, tmp_path / "m.xml", example_inputs=x)
    assert exported.integer_share == 1.0
    import openvino

    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(tmp_path / "m.xml", "CPU", settings)
    assert torch.allclose(torch.from_numpy(compiled(x.numpy())[0]), quantized(x), atol=3e-2)


class WrittenQueries(nn.Module):
    """As DabDetr: a part of the queries is written into, and a product with the input reads them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = x.new_zeros((x.shape[0], 5, 16))
        queries[:, 1:3] = 0.5
        return torch.matmul(queries + 0.25, x.transpose(1, 2))


def test_what_a_product_reads_stays_rounded(tmp_path) -> None:
    """A constant in float would leave the product in float."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    quantized = backquant.quantize(
        WrittenQueries().eval(),
        x,
        backend="onnxruntime",
        calibration=[x],
        capture="export",
        slower="keep",
    )
    exported = backquant.export(quantized, tmp_path / "m.onnx", example_inputs=x)
    assert exported.integer_share == 1.0


class Margins(nn.Module):
    """A border whose widths are computed in tensors of sizes (a U-Net that crops what it joins)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(11, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.inner(x)
        left = torch.tensor(x.shape)[2:] - torch.tensor(inner.shape)[2:]
        half = (left / 2).int()
        widths = torch.stack((half, half)).t().flatten()
        return self.last(torch.cat([nn.functional.pad(x, (-widths).tolist()), inner], 1))


def test_numbers_that_are_read_from_sizes(tmp_path) -> None:
    import onnxruntime

    x, path = torch.randn(2, 3, 9, 9), tmp_path / "m.onnx"
    quantized = backquant.quantize(Margins().eval(), backend="onnxruntime", calibration=[x])
    exported = backquant.export(quantized, path, example_inputs=x)
    assert exported.integer == exported.expected
    [found] = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), quantized(x), rtol=0, atol=0.05)
