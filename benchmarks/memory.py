"""Peak memory of quantizing a model: us beside torch.ao, each in a process of its own.

What the process holds is read from the system (resident memory; its peak is reset before the step),
with an allocator that gives freed blocks back at once. "float" is the size of the float weights, "int8"
that of the quantized ones, "activations" what one float forward of the calibration batch adds. The
bound of the project: model and quantization together stay within 2 × float + int8 + activations, so
that the step may add float + int8 + activations to the model that is there.

    python -m benchmarks.memory --models resnet50 bert_base --out out/memory.json

Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.models import MODELS, build
from benchmarks.resident import forget_peak, resident

MIB = 1 << 20
PEERS = ("ours", "torch.ao")
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def added_at_peak(step: Callable[[], Any]) -> tuple[float, Any]:
    """How much more memory there was at some time during ``step`` than before it, MiB."""
    forget_peak()
    before = resident()
    result = step()
    return resident("VmHWM") - before, result


def ours(model: nn.Module, batch: torch.Tensor) -> Any:
    import backquant

    return backquant.quantize(model, backend="x86", calibration=[batch])


def torch_ao(model: nn.Module, batch: torch.Tensor) -> Any:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (batch,))
    with torch.no_grad():
        prepared(batch)
    return convert_fx(prepared)


STEPS = {"ours": ours, "torch.ao": torch_ao}


def float_weights(model: nn.Module) -> tuple[float, float]:
    """Bytes of all parameters, and of the quantized weights as int8, MiB."""
    parameters = {id(p): p for p in model.parameters()}.values()
    weighted = [p for p in parameters if p.dim() > 1]
    return sum(p.nbytes for p in parameters) / MIB, sum(p.numel() for p in weighted) / MIB


def measured(peer: str, name: str) -> dict[str, float]:
    """In this process: what the step adds, and what bounds it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warm_up(peer)
    model, batch = build(name), MODELS[name].sample(1)
    total, int8 = float_weights(model)
    with torch.no_grad():
        model(batch)
        activations, _ = added_at_peak(lambda: model(batch))
    added, result = added_at_peak(lambda: STEPS[peer](model, batch))
    bound = total + int8 + activations
    rows = {"float": total, "int8": int8, "activations": activations, "added": added}
    del result
    return {**rows, "bound": bound, "added / bound": added / bound}


def warm_up(peer: str) -> None:
    """What is imported and cached once."""
    tiny = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    STEPS[peer](tiny, torch.randn(1, 3, 8, 8))


def in_a_process(peer: str, name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.memory", "--here", peer, "--models", name]
    environment = {**os.environ, **ALLOCATOR}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["failed"])[-1]
        return {"failed": reason[:200]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["resnet50", "bert_base"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--here", choices=PEERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here is not None:
        print(json.dumps(measured(options.here, options.models[0])))
        return
    rows: dict[str, dict[str, Any]] = {}
    print("MiB                    float   int8   activations   bound    added   added / bound")
    for name in options.models:
        for peer in PEERS:
            row = rows[f"{name}, {peer}"] = in_a_process(peer, name)
            if "failed" in row:
                print(f"{name + ', ' + peer:20} {row['failed']}")
                continue
            print(
                f"{name + ', ' + peer:20} {row['float']:7.1f} {row['int8']:6.1f}"
                f" {row['activations']:13.1f} {row['bound']:7.1f} {row['added']:8.1f}"
                f" {row['added / bound']:15.2f}",
                flush=True,
            )
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"rows": rows, "torch": torch.__version__}, indent=1))


if __name__ == "__main__":
    main()
