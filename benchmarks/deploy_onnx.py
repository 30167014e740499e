"""Models exported for ONNX Runtime and OpenVINO, beside these runtimes' floats and own quantizers.

All that runs on one runtime takes turns in one process, on one thread: ratios of CPU time within a
round, medians over the rounds. The SQNR is against the float model in PyTorch.

    python -m benchmarks.deploy_onnx resnet18 mobilenet_v2 --out out/deploy.json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.models import MODELS, build
from benchmarks.peers import Prepared, Task
from benchmarks.results import Row, sqnr

RUNS = 3  # of each in a round: the smallest counts


def runtimes() -> dict[str, dict[str, Any]]:
    """By runtime: its float model, its own quantizer, ours."""
    from benchmarks.peers import deployed, onnx_runtime
    from benchmarks.peers import openvino as ov

    return {
        "onnxruntime": {
            "float": onnx_runtime.prepare_float,
            "own": onnx_runtime.prepare_int8,
            "ours": deployed.prepare_onnxruntime,
        },
        "openvino": {
            "float": ov.prepare_float,
            "own": ov.prepare_int8,
            "ours": deployed.prepare_openvino,
        },
    }


def measured(prepared: dict[str, Prepared], feed: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Per name: the smallest CPU time of each round, ms."""
    inputs = {name: item.feed((feed,)) for name, item in prepared.items()}
    times: dict[str, list[float]] = {name: [] for name in prepared}
    for name, item in prepared.items():
        item.run(inputs[name])
    for _ in range(rounds):
        for name, item in prepared.items():
            best = float("inf")
            for _ in range(RUNS):
                start = time.process_time()
                item.run(inputs[name])
                best = min(best, time.process_time() - start)
            times[name].append(best * 1000)
    return times


def rows_of(name: str, rounds: int, only: list[str]) -> list[dict[str, Any]]:
    """One row per runtime and form of the model."""
    model = build(name)
    torch.manual_seed(1)
    sample = MODELS[name].sample
    calibration = [(sample(1),) for _ in range(4)]
    test = sample(1)
    with torch.no_grad():
        wanted = model(test).numpy()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        task = Task(name, model, calibration, 1, Path(folder))
        for runtime, forms in runtimes().items():
            if only and runtime not in only:
                continue
            prepared = {form: make(task) for form, make in forms.items()}
            times = measured(prepared, test, rounds)
            made = {form: Row(name, f"{runtime} {form}", tuple(times[form])) for form in prepared}
            for form, item in prepared.items():
                result = item.read(item.run(item.feed((test,))))
                rows.append(
                    {
                        "model": name,
                        "runtime": runtime,
                        "form": form,
                        "ms": made[form].milliseconds,
                        "against_float": made[form].ratio(made["float"]),
                        "against_own": made[form].ratio(made["own"]),
                        "sqnr": sqnr(wanted, result),
                        **item.facts,
                    }
                )
                print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    share = f"{row['integer_share']:6.1%}" if "integer_share" in row else " " * 6
    return (
        f"{row['model']:20s} {row['runtime']:12s} {row['form']:6s} {row['ms']:8.2f} ms  "
        f"{row['against_float']:5.2f}x float  {row['against_own']:5.2f}x own  "
        f"{row['sqnr']:6.1f} dB  {share}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", choices=sorted(MODELS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", action="append", default=[], help="a runtime")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        row for name in arguments.models for row in rows_of(name, arguments.rounds, arguments.only)
    ]
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
