"""Integer kernels beside the same operator in float32, one thread, batch 1: microseconds and ratios.

Each row is one kernel of the x86 table on one shape. The smallest of several timings counts, so that
other work on the machine matters little. Writes JSON with ``--out``.

    python benchmarks/kernels.py --repeat 15
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from backquant.lower.kernels import boundary, elementwise, pooling
from backquant.lower.kernels.conv import ConvConfig, OnednnConv
from backquant.lower.kernels.linear import LinearConfig, OnednnLinear
from backquant.lower.kernels.lookup import Lookup, tabulate
from backquant.lower.kernels.packed import WeightTensors

Case = tuple[str, Callable[[], Any], Callable[[], Any]]


def integers(*shape: int) -> torch.Tensor:
    x = torch.randint(0, 256, shape, dtype=torch.uint8)
    return x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x


def weights(*shape: int) -> WeightTensors:
    return WeightTensors(
        torch.randint(-127, 128, shape, dtype=torch.int8),
        torch.rand(shape[0]) * 0.01,
        torch.zeros(shape[0], dtype=torch.int64),
        torch.randn(shape[0]),
    )


def conv(channels: tuple[int, int], size: int, kernel: int, stride: int, groups: int) -> Case:
    inputs, outputs = channels
    pad = kernel // 2
    tensors = weights(outputs, inputs // groups, kernel, kernel)
    config = ConvConfig(
        (stride,) * 2, (pad,) * 2, (1, 1), groups, 0.05, 110, 0.3, 0, torch.uint8, "relu"
    )
    quantized, x = OnednnConv(config, tensors), integers(1, inputs, size, size)
    value, weight = x.float(), tensors.weight.float()
    name = f"conv {kernel}x{kernel}/{stride} {inputs}->{outputs} g{groups} {size}x{size}, relu"
    return (
        name,
        lambda: quantized(x),
        lambda: F.relu(F.conv2d(value, weight, tensors.bias, stride, pad, 1, groups)),
    )


def linear(rows: int, inputs: int, outputs: int) -> Case:
    tensors = weights(outputs, inputs)
    config = LinearConfig(0.05, 110, 0.3, 90, torch.uint8)
    quantized, x = OnednnLinear(config, tensors), integers(rows, inputs)
    value, weight = x.float(), tensors.weight.float()
    return (
        f"linear {inputs}->{outputs}, {rows} rows",
        lambda: quantized(x),
        lambda: F.linear(value, weight, tensors.bias),
    )


def others(channels: int, size: int) -> list[Case]:
    x, y = integers(1, channels, size, size), integers(1, channels, size, size)
    a, b = x.float(), y.float()
    gate, scale = integers(1, channels, 1, 1), (0.1, 3)
    table = Lookup("hardswish", tabulate(torch.uint8, lambda q: q))
    place = f"{channels} {size}x{size}"
    literals = (*scale, 0, 255, torch.uint8)
    return [
        (
            f"add {place}",
            lambda: elementwise.add(x, *scale, y, 0.07, 100, 0.15, 50),
            lambda: a + b,
        ),
        (
            f"mul by gate {place}",
            lambda: elementwise.mul(x, *scale, gate, 1 / 256, 0, 0.15, 50),
            lambda: a * gate,
        ),
        (
            f"max_pool 3/2 {place}",
            lambda: pooling.max_pool2d(x, [3, 3], [2, 2], [1, 1], [1, 1], False),
            lambda: F.max_pool2d(a, 3, 2, 1),
        ),
        (
            f"global average {place}",
            lambda: pooling.adaptive_avg_pool2d(x, *scale, [1, 1]),
            lambda: F.adaptive_avg_pool2d(a, 1),
        ),
        (f"table (hardswish) {place}", lambda: table(x), lambda: F.hardswish(a)),
        (f"quantize {place}", lambda: boundary.quantize(a, *literals), a.clone),
        (f"dequantize {place}", lambda: boundary.dequantize(x, *literals), a.clone),
    ]


def cases() -> list[Case]:
    return [
        conv((3, 64), 224, 7, 2, 1),
        conv((64, 64), 56, 3, 1, 1),
        conv((256, 256), 14, 3, 1, 1),
        conv((512, 512), 7, 3, 1, 1),
        conv((256, 64), 56, 1, 1, 1),
        conv((96, 576), 14, 1, 1, 1),
        conv((64, 128), 56, 1, 2, 1),
        conv((96, 96), 112, 3, 2, 96),
        conv((576, 576), 14, 3, 1, 576),
        linear(128, 768, 3072),
        linear(1, 768, 3072),
        *others(64, 56),
        *others(256, 14),
    ]


def microseconds(call: Callable[[], Any], repeat: int) -> float:
    for _ in range(3):
        call()
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(5):
            call()
        best = min(best, (time.perf_counter() - start) / 5)
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--repeat", type=int, default=15, help="timings per kernel")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    print(f"{'kernel':48} {'int8 us':>9} {'fp32 us':>9} {'ratio':>6}")
    with torch.no_grad():
        for name, quantized, plain in cases():
            int8, fp32 = (microseconds(call, options.repeat) for call in (quantized, plain))
            rows.append({"kernel": name, "int8_us": int8, "fp32_us": fp32, "ratio": fp32 / int8})
            print(f"{name:48} {int8:9.1f} {fp32:9.1f} {fp32 / int8:6.2f}")
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
