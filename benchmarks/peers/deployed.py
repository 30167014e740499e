"""backquant's exports, run by the runtimes that they are for."""

from __future__ import annotations

from pathlib import Path

import openvino

import backquant
from backquant.deploy import Exported
from benchmarks.peers import Prepared, Task
from benchmarks.peers.onnx_runtime import session
from benchmarks.peers.openvino import compiled

__all__ = ["prepare_onnxruntime", "prepare_openvino"]


def _exported(task: Task, backend: str, suffix: str) -> Exported:
    quantized = backquant.quantize(
        task.model, task.calibration[0], backend=backend, calibration=task.calibration
    )
    path: Path = task.workspace / f"backquant{suffix}"
    return backquant.export(quantized, path, require=0.0, overwrite=True)


def _with_facts(prepared: Prepared, exported: Exported) -> Prepared:
    facts = {
        "integer_share": exported.integer_share,
        "integer": exported.integer,
        "expected": exported.expected,
        "kernels": exported.kernel_counts,
        "left_in_float": [[str(r.node), r.admitted] for r in exported.left_in_float],
    }
    return Prepared(prepared.feed, prepared.run, prepared.read, {**prepared.facts, **facts})


def prepare_onnxruntime(task: Task) -> Prepared:
    exported = _exported(task, "onnxruntime", ".onnx")
    return _with_facts(session(exported.path, task.threads), exported)


def prepare_openvino(task: Task) -> Prepared:
    exported = _exported(task, "openvino", ".xml")
    model = openvino.Core().read_model(str(exported.path))
    return _with_facts(compiled(model, task.threads), exported)
