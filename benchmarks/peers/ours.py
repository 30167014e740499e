"""backquant, for its x86 backend, with its defaults."""

from __future__ import annotations

import backquant
from benchmarks.peers import Prepared, Task

__all__ = ["prepare"]


def prepare(task: Task) -> Prepared:
    quantized = backquant.quantize(
        task.model, task.calibration[0], backend="x86", calibration=task.calibration
    )
    audit = quantized.audit()
    facts = {
        "engine": str(quantized.engine),
        "integer_share": quantized.report.coverage,
        "kernels": audit.kernels,
        "integer_kernels": audit.integer_kernels,
        "left_in_float": [[node, "no integer kernel"] for node in audit.float_weighted],
        "quantize": audit.quantize,
        "dequantize": audit.dequantize,
    }
    return Prepared(lambda x: x, lambda x: quantized(*x), lambda y: y.numpy(), facts)
