"""Exports in benchmarks: what ours says of itself, and the capture that other quantizers start from."""

from __future__ import annotations

import copy

import torch

from backquant.deploy import Exported
from benchmarks.peers import Prepared, Task

__all__ = ["captured", "with_facts"]


def captured(task: Task) -> torch.fx.GraphModule:
    """A graph for ``prepare_pt2e``: strict where that works, as some quantizers need it."""
    model = copy.deepcopy(task.model)
    try:
        return torch.export.export(model, task.calibration[0], strict=True).module()
    except Exception:  # whatever the bytecode's reader does not take
        return torch.export.export(model, task.calibration[0]).module()


def with_facts(prepared: Prepared, exported: Exported) -> Prepared:
    facts = {
        "integer_share": exported.integer_share,
        "integer": exported.integer,
        "expected": exported.expected,
        "kernels": exported.kernel_counts,
        "left_in_float": [[str(r.node), r.admitted] for r in exported.left_in_float],
        "undelegated": [[str(r.node), r.admitted] for r in exported.undelegated],
    }
    return Prepared(prepared.feed, prepared.run, prepared.read, {**prepared.facts, **facts})
