"""torch.ao's FX mode for its x86 backend, with its default mapping."""

from __future__ import annotations

import warnings

from benchmarks.peers import Prepared, Task

__all__ = ["prepare"]


def prepare(task: Task) -> Prepared:
    warnings.simplefilter("ignore")
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    prepared = prepare_fx(task.model, get_default_qconfig_mapping("x86"), task.calibration[0])
    for batch in task.calibration:
        prepared(*batch)
    converted = convert_fx(prepared)
    return Prepared(lambda x: x, lambda x: converted(*x), lambda y: y.numpy())
