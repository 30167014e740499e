from __future__ import annotations

import torch

from backquant.lower import KernelUse
from backquant.match.plan import Reason
from backquant.report.build import standalone_kernels, standalone_reasons, standalone_rows
from backquant.report.model import Report, Row


def test_records_of_one_part() -> None:
    uses = [
        KernelUse(("block.conv", "block.add"), "conv2d", torch.uint8, "x86"),
        KernelUse(("blocks.conv",), "conv2d", torch.uint8, "x86"),
        KernelUse(("conv", "block.relu"), "conv2d", torch.uint8, "x86"),
    ]
    assert [use.nodes for use in standalone_kernels("block", uses)] == [("conv", "add")]
    reasons = [Reason(node, "no-kernel", "", "") for node in ("block.a.b", "block", "blocks.c")]
    assert [reason.node for reason in standalone_reasons("block", reasons)] == ["a.b"]


def test_rows_keep_totals_and_names_apart() -> None:
    call = Row("block", "Block", "outer.block", "quantized", ("stem",), multiply_adds=10)
    inner = Report(
        "x86",
        rows=(
            Row("fc", "Linear", "fc", "quantized", ("x",), multiply_adds=4),
            Row("add", "torch.add", "", "float", ("fc", "x"), multiply_adds=0),
        ),
    )
    rows = standalone_rows(call, inner, ["x"])
    assert [row.node for row in rows] == ["block", "block.fc", "block.add"]
    assert [row.module_path for row in rows] == ["outer.block", "outer.block.fc", "outer.block"]
    assert [row.inputs for row in rows] == [("stem",), ("stem",), ("block.fc", "stem")]
    assert sum(row.multiply_adds for row in rows) == call.multiply_adds


def test_what_is_counted_inside_is_never_more_than_the_call() -> None:
    call = Row("block", "Block", "block", "quantized", multiply_adds=3)
    inner = Report("x86", rows=(Row("fc", "Linear", "fc", "quantized", multiply_adds=4),))
    assert [row.multiply_adds for row in standalone_rows(call, inner, [])] == [0, 4]
