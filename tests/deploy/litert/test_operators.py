"""Operators beside the quantized model, output by output: integers within one step, most of them equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backquant
from backquant.deploy.litert.readback import LoadedFile

Function = Callable[..., Any]


class Several(nn.Module):
    """Operators side by side: each reads the same value, and gives an output."""

    def __init__(self, functions: dict[str, Function]) -> None:
        super().__init__()
        self.named = functions
        self.parts = nn.ModuleDict({k: f for k, f in functions.items() if isinstance(f, nn.Module)})

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.parts[k](x) if k in self.parts else f(x) for k, f in self.named.items())


def _reflected() -> nn.Module:
    return nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")


IMAGES: dict[str, Function] = {
    "same": nn.Conv2d(4, 6, 3, padding=1),
    "one_side": nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "valid": nn.Conv2d(4, 6, (3, 1), stride=(1, 2), bias=False),
    "even": nn.Conv2d(4, 6, 4, padding="same"),
    "dilated": nn.Conv2d(4, 6, 3, dilation=2),
    "grouped": nn.Conv2d(4, 6, 3, groups=2, padding=1),
    "depthwise": nn.Conv2d(4, 8, 3, groups=4, stride=2),
    "reflected": _reflected(),
    "clamped": nn.Sequential(nn.Conv2d(4, 6, 1), nn.Hardtanh(-0.25, 0.4)),
    "relu6": nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU6()),
    "transposed": nn.ConvTranspose2d(4, 6, 4, 2, 1),
    "transposed_cut": nn.ConvTranspose2d(4, 6, 3, 2, 1, 1),
    "transposed_dilated": nn.ConvTranspose2d(4, 6, 3, dilation=2),
    "flattened": nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(252, 5)),
    "upscaled": nn.Sequential(nn.Conv2d(4, 8, 3), nn.PixelShuffle(2)),
    "over_channels": nn.Sequential(nn.Conv2d(4, 6, 3), nn.Softmax(1)),
}
POOLS: dict[str, Function] = {
    "largest": nn.MaxPool2d(3, 2, 1),
    "largest_ceil": nn.MaxPool2d(3, 2, ceil_mode=True),
    "average": nn.AvgPool2d(3, 2),
    "average_padded": nn.AvgPool2d(3, 2, 1),
    "whole": nn.AdaptiveAvgPool2d(1),
    "mean": lambda x: x.mean((2, 3)),
    "mean_of_channels": lambda x: x.mean(1),
    "nearest": nn.Upsample(scale_factor=2),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "corners": nn.Upsample(size=(17, 15), mode="bilinear", align_corners=True),
}
VALUES: dict[str, Function] = {
    "add": lambda x: x + x.flip(2),
    "add_number": lambda x: x + 3,
    "sub_relu": lambda x: torch.relu(x - x.flip(2)),
    "mul": lambda x: x * x.flip(3),
    "mul_number": lambda x: x * 0.3,
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "softmax": nn.Softmax(-1),
    "log_softmax": nn.LogSoftmax(-1),
    "gelu": nn.GELU(),
    "elu": nn.ELU(),
    "silu": nn.SiLU(),
    "hardswish": nn.Hardswish(),
    "hardsigmoid": nn.Hardsigmoid(),
    "leaky_relu": nn.LeakyReLU(0.1),
    "prelu": nn.PReLU(4),
    "clamp": lambda x: x.clamp(-0.5, 0.8),
    "maximum": lambda x: torch.maximum(x, x.flip(2)),
    "matmul": lambda x: x @ x.transpose(-1, -2),
}
MOVES: dict[str, Function] = {
    "cat": lambda x: torch.cat([x, x.flip(2)], 1),
    "stack": lambda x: torch.stack([x, x.flip(2)], 1),
    "split": lambda x: torch.split(x, [1, 3], 1)[1],
    "select": lambda x: x.select(1, 2),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1), value=0.5),
    "pad_edges": lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate"),
    "pad_around": lambda x: F.pad(x, (1, 2, 0, 1), mode="circular"),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "reshape": lambda x: x.transpose(1, 2).reshape(2, -1, 8),
    "unsqueeze": lambda x: x.permute(0, 2, 3, 1).unsqueeze(2),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "channel_shuffle": nn.ChannelShuffle(2),
}
IN_FLOAT: dict[str, Function] = {
    "layer_norm": nn.Sequential(nn.Conv2d(4, 6, 1), nn.LayerNorm([6, 9, 8])),
    "group_norm": nn.Sequential(nn.Conv2d(4, 6, 1), nn.GroupNorm(2, 6)),
    "instance_norm": nn.Sequential(nn.Conv2d(4, 6, 1), nn.InstanceNorm2d(6)),
    "counts": nn.Sequential(nn.Conv2d(4, 6, 1), nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
    "counts_ceil": nn.Sequential(nn.Conv2d(4, 6, 1), nn.AvgPool2d(2, 2, ceil_mode=True)),
    "windows": nn.Sequential(nn.Conv2d(4, 6, 1), nn.AdaptiveAvgPool2d((4, 3))),
    "largest_place": lambda x: x.argmax(1),
    "chosen": lambda x: torch.where(x > 0, x, x.flip(2)),
    "sums": lambda x: x.sum(1),
    "slice": lambda x: x[:, 1:, ::2, -5:],
}
LINES: dict[str, Function] = {
    "line": nn.Conv1d(4, 6, 3, padding=1),
    "depthwise": nn.Conv1d(4, 4, 3, stride=2, padding=1, groups=4),
    "transposed": nn.ConvTranspose1d(4, 6, 4, 2, 1),
    "largest": nn.MaxPool1d(3, 2, 1),
    "average": nn.AvgPool1d(2),
    "linear": nn.Linear(12, 5),
}
TABLES = {"images": IMAGES, "pools": POOLS, "values": VALUES, "moves": MOVES, "lines": LINES}
#: Of what is composed of several roundings, or rounded by another rule, fewer values are equal.
FEWER_EQUAL = ("average", "bilinear", "corners", "hardswish", "leaky_relu", "silu", "matmul")


def _written(functions: dict[str, Function], x: torch.Tensor, path: Path) -> tuple[Any, LoadedFile]:
    model = Several(functions).eval()
    quantized = backquant.quantize(model, x, backend="litert", calibration=[x], slower="keep")
    exported = backquant.export(
        quantized, path, options={"integer_outputs": True}, require=0.0, example_inputs=x
    )
    del exported
    return quantized, LoadedFile(path.read_bytes())


def _compared(
    functions: dict[str, Function], x: torch.Tensor, path: Path
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, float]]:
    quantized, file = _written(functions, x, path)
    wanted, made = quantized(x), file.run([x.numpy()])
    details = file.interpreter.get_output_details()
    for name, one, other, detail in zip(functions, wanted, made, details, strict=True):
        yield name, one, torch.from_numpy(np.ascontiguousarray(other)), detail["quantization"][0]


@pytest.mark.parametrize("table", TABLES)
def test_integers_are_within_a_step(table: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 12) if table == "lines" else torch.randn(2, 4, 9, 8) * 1.5
    for name, one, other, step in _compared(TABLES[table], x, tmp_path / "ops.tflite"):
        assert step > 0, f"{name} is in float"
        assert one.shape == other.shape, name
        assert (one - other).abs().max() <= 1.01 * step, name
        equal = ((one - other).abs() < 0.5 * step).float().mean()
        assert equal >= (0.7 if name in FEWER_EQUAL else 0.99), (name, float(equal))


def test_what_has_no_kernel_on_integers_is_composed_in_float(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 8)
    for name, one, other, step in _compared(IN_FLOAT, x, tmp_path / "ops.tflite"):
        assert step == 0, f"{name} is on integers"
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4, msg=name)


def test_a_free_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 8)
    parts = {name: IMAGES[name] for name in ("same", "depthwise", "flattened")}
    model = Several(parts).eval()
    quantized = backquant.quantize(model, x, backend="litert", calibration=[x])
    path = tmp_path / "free.tflite"
    backquant.export(quantized, path, dynamic_shapes={"x": {0: "batch"}})
    file = LoadedFile(path.read_bytes())
    assert file.inputs == {"x": [None, 4, 9, 8]}
    for size in (1, 5, 3):
        other = torch.randn(size, 4, 9, 8)
        for one, made in zip(quantized(other), file.run([other.numpy()]), strict=True):
            torch.testing.assert_close(torch.from_numpy(made), one, rtol=0, atol=0.1)


def test_a_free_size_that_the_file_fixes_is_refused(tmp_path: Path) -> None:
    x = torch.randn(2, 4, 8, 8)
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 4, 2, 2)).eval()
    quantized = backquant.quantize(model, x, backend="litert", calibration=[x])
    with pytest.raises(backquant.ExportError, match="free sizes"):
        backquant.export(quantized, tmp_path / "m.tflite", dynamic_shapes={"input": {0: "batch"}})
    assert not list(tmp_path.iterdir())
