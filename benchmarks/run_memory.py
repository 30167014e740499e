"""Peak memory of 100 inferences: ours from its file, beside the peers from theirs.

Each peer quantizes the model in one process and leaves a file; a second process, with the default
allocator, imports what it needs (``start``), reads the file and infers 100 times. ``peak`` is the largest
resident memory on the way, ``added`` what that is above ``start``, ``held`` what is above it after the last
inference; MiB. Compiled models are not in it: their code is made in the process that runs it, and the
compiler's memory with it.

    python -m benchmarks.run_memory --models resnet50 mobilenet_v2 --out out/run_memory.json

Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.resident import forget_peak, resident

INFERENCES = 100
Infer = Callable[[], object]


def save_fp32(task: Any) -> None:
    import torch

    torch.save(task.model, task.workspace / "model.pt")


def save_ours(task: Any) -> None:
    import backquant

    batches = task.calibration
    made = backquant.quantize(task.model, batches[0], backend="x86", calibration=batches)
    backquant.save(made, task.workspace / "model.bq")


def save_onnx_runtime(task: Any) -> None:
    from benchmarks.peers import onnx_runtime

    onnx_runtime.prepare_int8(task)  # int8.onnx


def save_openvino(task: Any) -> None:
    import openvino

    from benchmarks.peers.openvino import quantized

    openvino.save_model(quantized(task), task.workspace / "int8.xml")


def run_fp32(folder: Path) -> Callable[[], Infer]:
    import torch

    import benchmarks.models  # makes torchvision importable

    assert benchmarks.models

    def load() -> Infer:
        torch.set_num_threads(1)
        model = torch.load(folder / "model.pt", weights_only=False)
        x = torch.from_numpy(np.load(folder / "x.npy"))

        def infer() -> object:
            with torch.no_grad():
                return model(x)

        return infer

    return load


def run_ours(folder: Path) -> Callable[[], Infer]:
    import torch

    import backquant

    def load() -> Infer:
        torch.set_num_threads(1)
        model = backquant.load(folder / "model.bq")
        x = torch.from_numpy(np.load(folder / "x.npy"))
        return lambda: model(x)

    return load


def run_onnx_runtime(folder: Path) -> Callable[[], Infer]:
    import onnxruntime

    def load() -> Infer:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = str(folder / "int8.onnx")
        session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
        feed = {session.get_inputs()[0].name: np.load(folder / "x.npy")}
        return lambda: session.run(None, feed)

    return load


def run_openvino(folder: Path) -> Callable[[], Infer]:
    import openvino

    def load() -> Infer:
        settings = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"}
        made = openvino.Core().compile_model(str(folder / "int8.xml"), "CPU", settings)
        request, feed = made.create_infer_request(), {0: np.load(folder / "x.npy")}
        return lambda: request.infer(feed, share_inputs=True, share_outputs=True)

    return load


#: What makes the file, and what runs it.
PEERS: dict[str, tuple[Callable[[Any], None], Callable[[Path], Callable[[], Infer]]]] = {
    "fp32": (save_fp32, run_fp32),
    "ONNX Runtime int8": (save_onnx_runtime, run_onnx_runtime),
    "OpenVINO int8": (save_openvino, run_openvino),
    "backquant x86": (save_ours, run_ours),
}


def save(peer: str, name: str, folder: Path) -> None:
    """In this process: the peer's file, and an input."""
    import torch

    from benchmarks.models import MODELS, build
    from benchmarks.peers import Task

    torch.set_num_threads(1)
    entry = MODELS[name]
    model = build(name)
    batches = [(entry.sample(1),) for _ in range(4)]
    np.save(folder / "x.npy", batches[0][0].numpy())
    with torch.no_grad():
        PEERS[peer][0](Task(name, model, batches, 1, folder, entry.transformer))


def run(peer: str, folder: Path) -> dict[str, float]:
    """In this process: what loading the file and inferring take."""
    load = PEERS[peer][1](folder)
    start = resident()
    forget_peak()
    infer = load()
    for _ in range(INFERENCES):
        infer()
    peak, held = resident("VmHWM"), resident()
    return {"start": start, "peak": peak, "added": peak - start, "held": held - start}


def in_a_process(*arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.run_memory", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["failed"])[-1][:200])
    return done.stdout


def row_of(peer: str, name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            in_a_process("--save", peer, "--folder", folder, "--models", name)
            found: dict[str, Any] = json.loads(in_a_process("--run", peer, "--folder", folder))
        except RuntimeError as error:
            return {"model": name, "peer": peer, "failed": str(error)}
    return {"model": name, "peer": peer, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["resnet50", "mobilenet_v2", "vit_b_16"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--save", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--run", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.save:
        save(options.save, options.models[0], options.folder)
        return 0
    if options.run:
        print(json.dumps(run(options.run, options.folder)))
        return 0
    rows = []
    print("| model | peer | start | peak | added | held |\n|---|---|---|---|---|---|")
    for name in options.models:
        for peer in PEERS:
            row = row_of(peer, name)
            rows.append(row)
            figures = [row.get(key) for key in ("start", "peak", "added", "held")]
            text = " | ".join(f"{figure:.0f}" for figure in figures if figure is not None)
            print(f"| {name} | {peer} | {row.get('failed') or text} |", flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
