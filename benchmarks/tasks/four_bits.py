"""Weights of 4 bits, one scale for each output channel: what recipes give back of what rounding loses.

    python -m benchmarks.tasks.four_bits --models faces pitch sentences

Activations have 8 bits, as on x86 by default; so has what the loss is counted from. Calibration and recipes
have all data that are apart from the tests. Of each: the task on test data, SQNR of the outputs in dB, and
the share that is gone of the noise that 4 bits add when they are rounded to the nearest, without any recipe.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch

import backquant
from backquant.backend_config import BackendConfig
from benchmarks.machine import machine
from benchmarks.tasks.__main__ import RECORDINGS, sqnr
from benchmarks.tasks.cases import CASES

RECIPES = ("none", "better", "best", "blocks")
STEPS = {"blocks": ["gptq", "blocks", "bias-correction"]}


def four_bits() -> BackendConfig:
    """x86 with weights between -8 and 7: its kernels sum them as any of 8 bits."""
    backend = backquant.get_backend_config("x86")
    defaults = backend.defaults
    assert defaults is not None
    weight = replace(defaults.weight, quant_min=-8, quant_max=7)
    return backend.set_defaults(replace(defaults, weight=weight))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=CASES, default=["faces", "pitch", "text"])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--recordings", type=Path, default=RECORDINGS)
    parser.add_argument("--out", type=Path, default=Path("out/four_bits"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    print("| task | weights | right | SQNR, dB | given back | CPU s |\n|---|---|---|---|---|---|")
    for name in options.models:
        torch.manual_seed(0)
        case = CASES[name](options.recordings)
        data = [*case.calibration, *case.held]
        with torch.no_grad():
            wanted = torch.cat([case.model(*batch) for batch in case.tests])
        noise: dict[str, float] = {}
        for bits, recipe in ((8, "default"), *((4, recipe) for recipe in options.recipes)):
            start = time.process_time()
            made = backquant.quantize(
                case.model,
                data[0],
                backend=four_bits() if bits == 4 else "x86",
                calibration=data,
                recipe=STEPS.get(recipe, recipe),
                slower="keep",
            )
            seconds = time.process_time() - start
            with torch.no_grad():
                found = [made(*batch) for batch in case.tests]
            level, right = sqnr(wanted, torch.cat(found)), case.metric(found)
            key = f"{bits} bits, {recipe}"
            noise[key] = 10 ** (-level / 10)
            nearest, eight = noise.get("4 bits, none"), noise["8 bits, default"]
            share = None if nearest is None else (nearest - noise[key]) / (nearest - eight)
            rows.append([name, key, right, level, share, seconds])
            back = "" if share is None else f"{share:.0%}"
            print(
                f"| {name} | {key} | {right:.3f} | {level:.1f} | {back} | {seconds:.0f} |",
                flush=True,
            )
    text = json.dumps({"machine": machine(), "rows": rows}, indent=1, default=str)
    (options.out / "four_bits.json").write_text(text)


if __name__ == "__main__":
    main()
