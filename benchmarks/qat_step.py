"""One optimizer step of quantization-aware training: float, ours, torch.ao, in one run, one thread.

The variants take turns, step by step, so that what else the machine does meets all of them; medians
of CPU time, and their ratios. Ours and torch.ao's end with the same weights, which is checked.

    python -m benchmarks.qat_step --model resnet18 --batch 8 --size 224 --steps 5 --out out/qat.json
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import backquant
from benchmarks.models import MODELS, build


class Variant:
    """A model with its optimizer and the times of its steps."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.seconds: list[float] = []

    def step(self, x: torch.Tensor, target: torch.Tensor, seed: int) -> None:
        torch.manual_seed(seed)  # dropout
        start = time.process_time()
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), target).backward()
        self.optimizer.step()
        self.seconds.append(time.process_time() - start)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def variants(model: nn.Module, x: torch.Tensor) -> dict[str, Variant]:
    """Copies of one model with the same weights. "frozen": nothing is measured any more."""
    ours = backquant.prepare_qat_fx(
        model,
        backquant.get_default_qat_qconfig_mapping("x86"),
        x,
        backend_config=backquant.backend_config.get_x86_backend_config(),
    )
    theirs = prepared_by_torch(model, x)
    made = {"float": copy.deepcopy(model), "ours": ours, "torch.ao": theirs}
    for name, prepared in (("ours", ours), ("torch.ao", theirs)):
        measured = copy.deepcopy(prepared)
        with torch.no_grad():
            measured(x)
        made[f"{name}, frozen"] = measured.apply(_stop_measuring)
    return {name: Variant(each) for name, each in made.items()}


def _stop_measuring(module: nn.Module) -> None:
    disable: Any = getattr(module, "disable_observer", None)
    if disable is not None:
        disable()


def prepared_by_torch(model: nn.Module, x: torch.Tensor) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import get_default_qat_qconfig_mapping
        from torch.ao.quantization.backend_config.x86 import get_x86_backend_config
        from torch.ao.quantization.quantize_fx import prepare_qat_fx

        return prepare_qat_fx(
            copy.deepcopy(model),
            get_default_qat_qconfig_mapping("x86"),
            (x,),
            backend_config=get_x86_backend_config(),
        )


def same_weights(one: nn.Module, two: nn.Module) -> bool:
    other = two.state_dict()
    return all(torch.equal(value, other[name]) for name, value in one.state_dict().items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18", choices=sorted(MODELS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build(options.model).train()
    shape = (options.batch, 3, options.size, options.size)
    made = variants(model, torch.randn(shape))
    for step in range(options.steps + 2):
        x = torch.randn(shape)
        target = torch.randint(0, 10, (options.batch,))
        for variant in made.values():
            variant.step(x, target, step)
    for variant in made.values():
        del variant.seconds[:2]  # warm up
    report(made, options)


def report(made: dict[str, Variant], options: argparse.Namespace) -> None:
    base = made["float"].median
    rows = {
        name: {"ms": 1000 * each.median, "times float": each.median / base}
        for name, each in made.items()
    }
    print(f"{options.model}, {options.batch} × 3 × {options.size} × {options.size}, one thread")
    for name, row in rows.items():
        print(f"{name:18} {row['ms']:9.1f} ms   {row['times float']:5.2f} × float")
    ratios = {
        kind or "measuring": made[f"ours{kind}"].median / made[f"torch.ao{kind}"].median
        for kind in ("", ", frozen")
    }
    same = same_weights(made["torch.ao"].model, made["ours"].model)
    print("ours / torch.ao:", ", ".join(f"{k.strip(', ')} {v:.2f}" for k, v in ratios.items()))
    print("equal weights after all steps:", same)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "rows": rows,
            "ours / torch.ao": ratios,
            "equal": same,
            "torch": torch.__version__,
        }
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
