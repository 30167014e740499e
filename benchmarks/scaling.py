"""How the time of the tool grows with the graph: prepare and convert, us beside torch.ao, in one run.

A chain of conv-bn-relu-conv-add blocks (five operators each), 8 channels, one thread. Prints a table
and the fitted exponent of time over operators, and writes JSON with ``--out``.

    python benchmarks/scaling.py --blocks 50 100 200 400 --torch-ao-up-to 200
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import backquant
from backquant.qconfig import get_default_qconfig_mapping

OPERATORS_PER_BLOCK = 5


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(self.relu(self.bn(self.conv1(x))))


def chain(blocks: int, channels: int = 8) -> nn.Module:
    return nn.Sequential(*(Block(channels) for _ in range(blocks))).eval()


def timed(step: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = step()
    return time.process_time() - start, result


def ours(blocks: int) -> dict[str, float]:
    model, x = chain(blocks), torch.randn(1, 8, 8, 8)
    config = backquant.get_backend_config("x86")
    mapping = get_default_qconfig_mapping("x86")
    prepare, prepared = timed(
        lambda: backquant.prepare_fx(model, mapping, x, backend_config=config)
    )
    prepared(x)
    convert, _ = timed(lambda: backquant.convert_fx(prepared))
    return {"prepare": prepare, "convert": convert}


def torch_ao(blocks: int) -> dict[str, float]:
    from torch.ao.quantization import get_default_qconfig_mapping as default_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    model, x = chain(blocks), torch.randn(1, 8, 8, 8)
    prepare, prepared = timed(lambda: prepare_fx(model, default_mapping("x86"), (x,)))
    prepared(x)
    convert, _ = timed(lambda: convert_fx(prepared))
    return {"prepare": prepare, "convert": convert}


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """Slope of log seconds over log size, by least squares."""
    xs, ys = [math.log(s) for s in sizes], [math.log(t) for t in seconds]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mx) ** 2 for x in xs)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[50, 100, 200, 400])
    parser.add_argument("--torch-ao-up-to", type=int, default=200, metavar="BLOCKS")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ours(5)
    rows = []
    print("operators   ours prepare  convert    torch.ao prepare  convert    ratio")
    for blocks in arguments.blocks:
        row: dict[str, Any] = {"operators": blocks * OPERATORS_PER_BLOCK, "ours": ours(blocks)}
        line = f"{row['operators']:9d} {row['ours']['prepare']:13.2f} {row['ours']['convert']:8.2f}"
        if blocks <= arguments.torch_ao_up_to:
            row["torch_ao"] = torch_ao(blocks)
            row["ratio"] = sum(row["torch_ao"].values()) / sum(row["ours"].values())
            theirs = row["torch_ao"]
            line += f" {theirs['prepare']:17.2f} {theirs['convert']:8.2f} {row['ratio']:7.1f}×"
        print(line, flush=True)
        rows.append(row)
    fitted = None
    if len(rows) > 1:
        totals = [sum(row["ours"].values()) for row in rows]
        fitted = exponent([row["operators"] for row in rows], totals)
        print(f"ours grows with the {fitted:.2f}th power of the graph")
    if arguments.out:
        arguments.out.write_text(json.dumps({"rows": rows, "exponent": fitted}, indent=2))


if __name__ == "__main__":
    main()
