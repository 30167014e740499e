"""Each attribute of operators, out of their schemas, on targets: equal, or refused.

All operators and targets: ``tools/attributes_by_target.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = ("aten.leaky_relu.default", "aten.flip.default")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    import attributes_by_target

    yield attributes_by_target
    del sys.modules["attributes_by_target"]


def test_attributes_are_honoured_or_refused(tool: ModuleType) -> None:
    named = [*tool.every_cell(OPERATORS)]
    covered = {(cell.operator, cell.of) for cell in named}
    assert {(OPERATORS[0], "negative_slope"), (OPERATORS[1], "dims")} <= covered
    cells = [*tool.sampled(named, 16)]
    assert {cell.operator for cell in cells} == set(OPERATORS)
    rows = tool.run(cells, ["onnx"], None)
    assert len(rows) == len(cells)
    assert [row for row in rows if row["status"] in tool.FINDINGS] == []


#: Calls that a target computed otherwise once, by target and operator.
ONCE_WRONG = {
    ("openvino", "aten.avg_pool2d.default"): (
        "kernel_size=[2, 2], divisor_override=-1",
        "kernel_size=[3, 3], stride=[2, 2], padding=[1, 1], ceil_mode=True, "
        "count_include_pad=False, divisor_override=3",
    ),
    ("onnx", "aten.conv_transpose2d.input"): ("output_padding=[0]",),
    ("onnx", "aten.squeeze.dim"): ("dim=2",),
    ("onnx", "aten.elu.default"): ("input_scale=0.5", "alpha=0.5, scale=2.0, input_scale=0.5"),
    ("litert", "aten.flip.default"): ("dims=[]", "dims=[1, 2]"),
    ("litert", "aten.narrow.default"): ("dim=1, start=0, length=2",),
    ("onnx", "aten.clamp.default"): ("min=2, max=2.0", "min=-1.0, max=2"),
    ("openvino", "aten.adaptive_avg_pool1d.default"): ("output_size=[1]",),
}


@pytest.mark.parametrize("place", ONCE_WRONG, ids="-".join)
def test_what_a_target_computed_otherwise(tool: ModuleType, place: tuple[str, str]) -> None:
    target, operator = place
    names = {f"{operator}({said})" for said in ONCE_WRONG[place]}
    cells = [cell for cell in tool.every_cell([operator]) if cell.name in names]
    assert {cell.name for cell in cells} == names
    rows = tool.run(cells, [target], None)
    assert {row["status"] for row in rows} <= {"equal", "equal at fixed sizes"}, rows


def test_the_page_counts_calls_and_gives_reasons(tool: ModuleType) -> None:
    row = {"target": "litert", "operator": "aten.elu.default", "of": "alpha", "cell": "a"}
    said = "LiteRT has no counterpart for aten.elu.default: another slope than 1 where calls.0"
    rows = [
        row | {"status": "equal", "words": "", "of": ""},
        row | {"status": "refused", "words": said},
    ]
    page = tool.page(rows)
    assert "| litert | 1 | 1 | 2 | 1 | 0 | 1 | 0 | 0 |" in page
    assert "| litert | `elu.default` | another slope than N |" in page


def test_a_difference_is_a_finding(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    [cell] = [c for c in tool.every_cell(OPERATORS[:1]) if not c.of]
    load = tool.load_exported

    class Other:
        def __init__(self, path: Path, threads: int) -> None:
            self.loaded = load(path, threads)

        def run(self, inputs: list[object]) -> list[object]:
            return [1.2 * value for value in self.loaded.run(inputs)]

    monkeypatch.setattr(tool, "load_exported", Other)
    [row] = tool.run([cell], ["onnx"], None)
    assert row["status"] == "differs"


def test_a_runtime_that_crashes_ends_one_model(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [*tool.every_cell(["aten.clone"])]
    monkeypatch.setattr(tool, "_outcomes", lambda *_, **__: os._exit(11))
    child = tool.Child(cells)
    assert [each.status for each in child.ask("onnx", cells, is_free=True)] == ["crashes"]
    child.close()


@pytest.mark.parametrize(
    ("status", "beside"),
    [("refused", "refused beside others"), ("raises", "differs beside others")],
)
def test_a_model_that_is_not_taken_while_its_parts_are(
    tool: ModuleType, status: str, beside: str
) -> None:
    cells = [*tool.every_cell(["aten.leaky_relu.default"])][:6]
    pair = {cells[1].name, cells[4].name}

    def ask(asked: list[Any], *, is_free: bool) -> list[Any]:
        is_whole = pair <= {cell.name for cell in asked}
        return [tool.Outcome(status if is_whole else "equal", "0.0 dB")] * len(asked)

    found = tool.outcomes(ask, cells)
    named = zip(cells, found, strict=True)
    assert {cell.name for cell, each in named if each.status == beside} == pair
    assert (beside in tool.FINDINGS) == (status == "raises")
