"""Values taken by indices, masks, windows and fills: in LiteRT's interpreter as in the quantized model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backquant
from backquant.deploy.litert.target import LoadedFile

ONE = torch.tensor([0, -1, 2])
MATRIX = torch.tensor([[1], [-2]])
MASK = torch.tensor([True, False, True, True])
CASES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "along one axis": lambda x, _: x[:, ONE],
    "a matrix": lambda x, _: x[:, :, MATRIX],
    "channels last": lambda x, _: F.max_pool2d(x, 2)[:, :, MATRIX],
    "along neighbours": lambda x, _: x[:, MATRIX, ONE],
    "along axes apart": lambda x, _: x[:, ONE, :, ONE],
    "channels last along two": lambda x, _: F.max_pool2d(x, 2)[:, :, MATRIX, ONE],
    "a mask": lambda x, _: x[:, MASK],
    "a mask of two axes": lambda x, _: x[:, torch.ones(4, 9).bool().tril()],
    "a mask and an index": lambda x, _: x[:, MASK, ONE],
    "computed": lambda x, k: x[:, k],
    "computed along two": lambda x, k: x[:, k[:, None], ONE],
    "computed along axes apart": lambda x, k: x[ONE % 2, :, k],
    "gather": lambda x, _: x.gather(2, MATRIX.abs().expand(2, 4, 2, 1)),
    "gather computed": lambda x, k: x.gather(-1, (k % 4).expand(2, 3, 9, 3)),
    "windows": lambda x, _: F.max_pool2d(x, 2).unfold(1, 2, 1),
    "windows of the last": lambda x, _: x.unfold(-1, 4, 2),
    "columns": lambda x, _: F.unfold(x, (2, 3), padding=1, stride=2, dilation=(2, 1)),
    "filled": lambda x, _: x * torch.full_like(x, 0.5),
    "of integers": lambda _, k: k[ONE],
    "of integers along two": lambda _, k: k.expand(2, 3)[ONE % 2, ONE],
}


class _Taken(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.conv, self.names = nn.Conv2d(4, 4, 1), names

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        integers = self.conv(x)
        return tuple(CASES[name](each, k) for name in self.names for each in (integers, x))


X, K = torch.randn(2, 4, 9, 8), torch.tensor([1, -2, 0])


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_values_are_equal(capture: str, tmp_path: Path) -> None:
    # torch.export has no sizes for what a mask takes; a symbolic trace names its places
    names = [name for name in CASES if capture == "trace" or "mask" not in name]
    model = _Taken(*names).eval()
    quantized = backquant.quantize(
        model, (X, K), backend="litert", calibration=[(X, K)], slower="keep", capture=capture
    )
    backquant.export(quantized, tmp_path / "m.tflite", require=0.0)
    made = LoadedFile((tmp_path / "m.tflite").read_bytes()).run([X.numpy(), K.numpy()])
    for place, (wanted, array) in enumerate(zip(quantized(X, K), made, strict=True)):
        torch.testing.assert_close(
            torch.from_numpy(array.copy()), wanted, rtol=0, atol=1e-6, msg=names[place // 2]
        )


def test_what_has_no_size_in_the_file_is_refused(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            return x[x > 0].sum(0)

    x = torch.randn(3, 4)
    quantized = backquant.quantize(Masked().eval(), x, backend="litert", calibration=[x])
    with pytest.raises(backquant.ExportError, match="a mask that is computed"):
        backquant.export(quantized, tmp_path / "m.tflite")
    assert not list(tmp_path.iterdir())


def test_indices_along_a_free_size(tmp_path: Path) -> None:
    class Chosen(nn.Module):
        def __init__(self, rows: list[int]) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("rows", torch.tensor(rows))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)[self.rows]

    x, path = torch.randn(3, 4), tmp_path / "m.tflite"
    for rows in ([0, 2], [0, -1]):
        quantized = backquant.quantize(Chosen(rows).eval(), x, backend="litert", calibration=[x])
        shapes = {"x": {0: torch.export.Dim("batch", min=3, max=8)}}
        if rows[-1] < 0:
            with pytest.raises(backquant.ExportError, match="a negative index along a free size"):
                backquant.export(quantized, path, dynamic_shapes=shapes, overwrite=True)
            continue
        backquant.export(quantized, path, dynamic_shapes=shapes)
        more = torch.randn(5, 4)
        [made] = LoadedFile(path.read_bytes()).run([more.numpy()])
        torch.testing.assert_close(torch.from_numpy(made), quantized(more), rtol=0, atol=0.05)
