"""What ``quantize`` takes, stage by stage, beside the float model: CPU seconds, one thread.

A row a model: the whole; the limit, which is 4 forwards of the float model for each batch of calibration
and 5 seconds; the forwards; and the seconds of each stage without those of stages inside of it. ``rest`` is
what no stage holds. Models are those of ``benchmarks.stock`` and ``torchvision.models`` by name.

    python -m benchmarks.tool_time torchvision.resnet18 swin_t --batches 4
    python -m benchmarks.tool_time --out out/tool_time.json            # the whole catalogue
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

import backquant
from backquant.accuracy.recipes import followed
from backquant.api import one_call
from backquant.calibrate.batches import called_on_example
from backquant.calibrate.measure import measure
from backquant.convert import convert_to_reference
from backquant.fuse import plan_fused
from backquant.graph import as_arguments, capture
from backquant.graph.export.capture import capture_export
from backquant.pipeline.lower import quantized_model
from backquant.pipeline.plan import costs_of
from backquant.pipeline.prepare import prepared_for_inference
from backquant.report.recorded import with_reporting
from backquant.speed.slower import the_faster
from benchmarks import stock
from benchmarks.stock.catalogue import build, catalogue

assert stock  # makes torchvision importable
assert one_call  # imported before its names are replaced

#: Functions by the name of the stage.
STAGES: dict[str, Callable[..., Any]] = {
    "check": called_on_example,
    "trace": capture,
    "export": capture_export,
    "plan": plan_fused,
    "costs": costs_of,
    "prepare": prepared_for_inference,
    "count": with_reporting,
    "calibrate": measure,
    "recipe": followed,
    "convert": convert_to_reference,
    "lower": quantized_model,
    "time": the_faster,
}
LARGE = ("swin_t", "swin_v2_t", "vit_b_16", "maxvit_t")
_FORWARDS, _SECONDS = 4.0, 5.0


@dataclass
class Stages:
    """CPU seconds of each stage, and how often it was entered."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    _inner: list[float] = field(default_factory=lambda: [0.0])

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                whole = time.process_time() - start
                self.seconds[name] = self.seconds.get(name, 0.0) + whole - self._inner.pop()
                self.calls[name] = self.calls.get(name, 0) + 1
                self._inner[-1] += whole

        return run


@contextmanager
def staged() -> Iterator[Stages]:
    """Time the stages wherever a module of backquant holds one."""
    stages, replaced = Stages(), []
    timed = {id(f): stages.timed(name, f) for name, f in STAGES.items()}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "backquant":
            continue
        for key, value in list(vars(module).items()):
            if id(value) in timed:
                replaced.append((module, key, value))
                setattr(module, key, timed[id(value)])
    try:
        yield stages
    finally:
        for module, key, value in replaced:
            setattr(module, key, value)


def model_of(name: str) -> tuple[nn.Module, Any]:
    """A model and one batch for it."""
    if name in catalogue():
        entry = catalogue()[name]
        return build(entry), entry.sample(1)
    import torchvision

    torch.manual_seed(0)
    make = getattr(torchvision.models, name, None) or getattr(torchvision.models.video, name)
    size = (3, 16, 224, 224) if name.startswith("mvit") else (3, 224, 224)
    return make(weights=None).eval(), torch.randn(1, *size)


def forward(model: nn.Module, batch: Any) -> float:
    """CPU seconds of a call: the smaller of two, after one that counts nothing."""
    args, kwargs = as_arguments(batch)
    times = []
    with torch.no_grad():
        for _ in range(3):
            start = time.process_time()
            model(*args, **kwargs)
            times.append(time.process_time() - start)
    return min(times[1:])


def row_of(name: str, backend: str, batches: int) -> dict[str, Any]:
    model, batch = model_of(name)
    once = forward(model, batch)
    gc.collect()
    with staged() as stages:
        start = time.process_time()
        backquant.quantize(model, batch, backend=backend, calibration=[batch] * batches)
        whole = time.process_time() - start
    limit = _FORWARDS * once * batches + _SECONDS
    rest = whole - sum(stages.seconds.values())
    return {
        "model": name,
        "quantize": whole,
        "limit": limit,
        "forwards": once * batches,
        "stages": stages.seconds | {"rest": rest},
        "calls": stages.calls,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", help="default: the catalogue and a few large ones")
    parser.add_argument("--backend", default="x86")
    parser.add_argument("--batches", type=int, default=4, help="of one, for calibration")
    parser.add_argument("--out", type=Path, default=Path("out/bench/tool_time.json"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    row_of("facenet.PNet", options.backend, 1)  # what only the first call pays
    rows: list[dict[str, Any]] = []
    head = [*STAGES, "rest"]
    print("| model | quantize | limit | forwards | " + " | ".join(head) + " |")
    print("|---" * (len(head) + 4) + "|")
    for name in options.models or [*catalogue(), *LARGE]:
        try:
            row = row_of(name, options.backend, options.batches)
        except backquant.BackquantError as error:
            print(f"| {name} | {type(error).__name__}: {str(error).splitlines()[0]} |", flush=True)
            continue
        rows.append(row)
        figures = [row["quantize"], row["limit"], row["forwards"]]
        figures += [row["stages"].get(stage, 0.0) for stage in head]
        print(f"| {name} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |", flush=True)
    over = [row["model"] for row in rows if row["quantize"] > row["limit"]]
    print(f"{len(over)} of {len(rows)} over the limit: {', '.join(over) or 'none'}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
