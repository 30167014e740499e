"""backquant, for its x86 backend, with its defaults: lowered, and compiled."""

from __future__ import annotations

import os
from typing import Any

import backquant
from backquant.runtime import QuantizedModel
from benchmarks.peers import Prepared, Task

__all__ = ["prepare", "prepare_compiled", "prepare_kept", "prepare_library", "prepare_searched"]


def _quantized(task: Task, recipe: str = "default", **options: Any) -> QuantizedModel:
    batches = task.calibration
    return backquant.quantize(
        task.model, batches[0], backend="x86", calibration=batches, recipe=recipe, **options
    )


def _prepared(model: QuantizedModel, **facts: Any) -> Prepared:
    audit = model.audit()
    facts = {
        "engine": str(model.engine),
        "integer_share": model.report.coverage,
        "kernels": audit.kernels,
        "integer_kernels": audit.integer_kernels,
        "left_in_float": [[node, "no integer kernel"] for node in audit.float_weighted],
        "quantize": audit.quantize,
        "dequantize": audit.dequantize,
        **facts,
    }
    return Prepared(lambda x: x, lambda x: model(*x), lambda y: y.numpy(), facts)


def prepare(task: Task, recipe: str = "default") -> Prepared:
    """As ``quantize`` gives it, on PyTorch's own kernels."""
    os.environ["BACKQUANT_KERNELS"] = "off"  # a peer has a process of its own
    return _prepared(_quantized(task, recipe))


def prepare_kept(task: Task) -> Prepared:
    """The same as ``prepare``, with all on integers, whatever the timings of this run are."""
    os.environ["BACKQUANT_KERNELS"] = "off"
    return _prepared(_quantized(task, slower="keep"))


def prepare_library(task: Task, recipe: str = "default") -> Prepared:
    """As ``quantize`` gives it, on the library of kernels."""
    backquant.native.build_kernels()
    if reason := backquant.native.missing():
        raise RuntimeError(reason)
    return _prepared(_quantized(task, recipe))


def prepare_compiled(task: Task) -> Prepared:
    """The same, after ``compile()``."""
    model = _quantized(task).compile()
    return _prepared(model, kernels=dict(model.compilation.kernels))


def prepare_searched(task: Task, max_drop: float, recipe: str = "default") -> Prepared:
    """The fastest within a drop of the metric on held data."""
    found = backquant.search(
        task.model,
        task.held,
        "x86",
        budget={"max_drop": max_drop},
        metric=lambda model: task.judged(lambda batch: model(*batch)),
        calibration=task.calibration,
        recipe=recipe,
    )
    return _prepared(found.model, met=found.met, seconds=found.seconds)
