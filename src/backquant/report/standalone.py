"""What a report says of the operators inside of standalone modules."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from backquant.lower import KernelUse
from backquant.match.plan import Reason
from backquant.report.model import Report, Row


def standalone_kernels(path: str, kernels: Iterable[KernelUse]) -> tuple[KernelUse, ...]:
    """The kernels of the standalone module at ``path``, by the names of its own nodes.

    >>> import torch
    >>> use = KernelUse(("block.conv",), "conv2d", torch.uint8, "x86")
    >>> standalone_kernels("block", [use])[0].nodes
    ('conv',)
    """
    start = f"{path}."
    return tuple(
        replace(use, nodes=tuple(name.removeprefix(start) for name in use.nodes))
        for use in kernels
        if all(name.startswith(start) for name in use.nodes)
    )


def standalone_reasons(path: str, reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """The reasons about nodes of the standalone module at ``path``, by their own names.

    >>> standalone_reasons("block", [Reason("block.conv", "no-kernel", "", "")])[0].node
    'conv'
    """
    start = f"{path}."
    return tuple(
        replace(reason, node=reason.node.removeprefix(start))
        for reason in reasons
        if reason.node.startswith(start)
    )


def standalone_rows(row: Row, report: Report, inputs: Collection[str]) -> list[Row]:
    """``row``, of a call of a standalone module, and those of the operators in it.

    Multiply-adds are counted where they are known: inside, the rest at the call. ``inputs`` are the
    names of the module's own inputs; what reads them reads what the call reads.

    >>> call = Row("block", "Block", "block", "quantized", inputs=("stem",), multiply_adds=10)
    >>> inner = Report("x86", rows=(Row("fc", "Linear", "fc", "float", ("x",), multiply_adds=8),))
    >>> [(r.node, r.module_path, r.inputs, r.multiply_adds) for r in standalone_rows(call, inner, ["x"])]
    [('block', 'block', ('stem',), 2), ('block.fc', 'block.fc', ('stem',), 8)]
    """
    inside = [
        replace(
            inner,
            node=f"{row.node}.{inner.node}",
            module_path=f"{row.module_path}.{inner.module_path}".rstrip("."),
            inputs=tuple(
                outer
                for name in inner.inputs
                for outer in (row.inputs if name in inputs else (f"{row.node}.{name}",))
            ),
        )
        for inner in report.rows
    ]
    known = sum(inner.multiply_adds for inner in inside)
    rest = max(0, row.multiply_adds - known)
    return [replace(row, multiply_adds=rest, uncounted=()), *inside]
