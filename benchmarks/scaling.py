"""How the time of the tool grows with the graph: prepare and convert, us beside torch.ao, in one run.

A chain of conv-bn-relu-conv-add blocks (five operators each), 8 channels, one thread, CPU seconds.
``prepare``: capture, match, fuse, insert observers. ``convert``: qparams, reference model, lowering to
kernels. Prints a table and the fitted exponents of time over operators, and writes JSON with ``--out``
and a picture with ``--plot``.

    python -m benchmarks.scaling --out out/scaling.json --plot out/scaling.png
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
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
    """CPU seconds, with the collection of young garbage that a step may have left for later."""
    start = time.process_time()
    result = step()
    gc.collect(0)
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


def fitted(rows: list[dict[str, Any]], peer: str, least: int) -> float | None:
    """The exponent over the rows of a peer with at least ``least`` operators."""
    known = [row for row in rows if peer in row and row["operators"] >= least]
    if len(known) < 2:
        return None
    totals = [sum(row[peer].values()) for row in known]
    return exponent([row["operators"] for row in known], totals)


def smallest(step: Callable[[int], dict[str, float]], blocks: int, runs: int) -> dict[str, float]:
    """Of each part the smallest time of several runs."""
    times = [step(blocks) for _ in range(runs)]
    return {part: min(each[part] for each in times) for part in times[0]}


def draw(rows: list[dict[str, Any]], exponents: dict[str, float | None], path: Path) -> None:
    """Both curves on logarithmic axes; the kind of picture by the suffix of ``path``. Without
    matplotlib, say so on standard error."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for peer, title in (("ours", "backquant"), ("torch_ao", "torch.ao")):
        known = [row for row in rows if peer in row]
        power = exponents[peer]
        grows = "" if power is None else f": grows with the {power:.2f}th power"
        sizes, seconds = [], []
        for row in known:
            sizes.append(row["operators"])
            seconds.append(sum(row[peer].values()))
        axes.loglog(sizes, seconds, "o-", label=title + grows)
        for size, value in zip(sizes, seconds, strict=True):
            place = (size, value)
            axes.annotate(f"{value:.2g}", place, (0, 6), textcoords="offset points", ha="center")
    axes.set_xticks([row["operators"] for row in rows])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.margins(y=0.12)
    axes.set_xlabel("operators")
    axes.set_ylabel("CPU seconds to prepare and convert")
    axes.grid(which="major", linewidth=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[50, 200, 400, 800, 2000, 4000])
    parser.add_argument("--torch-ao-up-to", type=int, default=800, metavar="BLOCKS")
    parser.add_argument("--runs", type=int, default=1, help="the smallest time of so many counts")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ours(5), torch_ao(5)
    rows: list[dict[str, Any]] = []
    print("operators   ours prepare  convert    torch.ao prepare  convert    ratio")
    for blocks in arguments.blocks:
        row: dict[str, Any] = {"operators": blocks * OPERATORS_PER_BLOCK}
        own = row["ours"] = smallest(ours, blocks, arguments.runs)
        line = f"{row['operators']:9d} {own['prepare']:13.2f} {own['convert']:8.2f}"
        if blocks <= arguments.torch_ao_up_to:
            theirs = row["torch_ao"] = smallest(torch_ao, blocks, arguments.runs)
            row["ratio"] = sum(theirs.values()) / sum(own.values())
            line += f" {theirs['prepare']:17.2f} {theirs['convert']:8.2f} {row['ratio']:7.1f}×"
        print(line, flush=True)
        rows.append(row)
    exponents = {peer: fitted(rows, peer, 1000) for peer in ("ours", "torch_ao")}
    for peer, power in exponents.items():
        if power is not None:
            print(
                f"{peer} grows with the {power:.2f}th power of the graph, from 1,000 operators on"
            )
    if arguments.out:
        arguments.out.write_text(json.dumps({"rows": rows, "exponents": exponents}, indent=2))
    if arguments.plot:
        draw(rows, exponents, arguments.plot)


if __name__ == "__main__":
    main()
