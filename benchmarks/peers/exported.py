"""What an export says of itself, as facts of a benchmark."""

from __future__ import annotations

from backquant.deploy import Exported
from benchmarks.peers import Prepared

__all__ = ["with_facts"]


def with_facts(prepared: Prepared, exported: Exported) -> Prepared:
    facts = {
        "integer_share": exported.integer_share,
        "integer": exported.integer,
        "expected": exported.expected,
        "kernels": exported.kernel_counts,
        "left_in_float": [str(reason.node) for reason in exported.left_in_float],
    }
    return Prepared(prepared.feed, prepared.run, prepared.read, {**prepared.facts, **facts})
