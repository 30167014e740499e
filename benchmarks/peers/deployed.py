"""backquant's exports, run by the runtimes that they are for."""

from __future__ import annotations

from pathlib import Path

import openvino

import backquant
from backquant.deploy import Exported
from backquant.runtime import QuantizedModel
from benchmarks.peers import Prepared, Task
from benchmarks.peers.onnx_runtime import session
from benchmarks.peers.openvino import compiled

__all__ = ["prepare_onnxruntime", "prepare_openvino", "prepare_searched_openvino"]


def _exported(task: Task, backend: str, suffix: str, recipe: str = "default") -> Exported:
    batches = task.calibration
    quantized = backquant.quantize(
        task.model, batches[0], backend=backend, calibration=batches, recipe=recipe
    )
    return _written(task, quantized, suffix)


def _written(task: Task, quantized: QuantizedModel, suffix: str) -> Exported:
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


def prepare_onnxruntime(task: Task, recipe: str = "default") -> Prepared:
    exported = _exported(task, "onnxruntime", ".onnx", recipe)
    return _with_facts(session(exported.path, task.threads), exported)


def prepare_openvino(task: Task, recipe: str = "default") -> Prepared:
    return _run_by_openvino(task, _exported(task, "openvino", ".xml", recipe))


def _run_by_openvino(task: Task, exported: Exported) -> Prepared:
    model = openvino.Core().read_model(str(exported.path))
    return _with_facts(compiled(model, task.threads), exported)


def prepare_searched_openvino(task: Task, max_drop: float, recipe: str = "default") -> Prepared:
    """The fastest within a drop of the metric on held data, as OpenVINO runs it."""
    found = backquant.search(
        task.model,
        task.held,
        "openvino",
        budget={"max_drop": max_drop},
        metric=lambda model: task.judged(lambda batch: model(*batch)),
        calibration=task.calibration,
        recipe=recipe,
    )
    return _run_by_openvino(task, _written(task, found.model, ".xml"))
