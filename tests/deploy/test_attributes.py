"""Each attribute of operators, out of their schemas, in ONNX Runtime: equal, or refused.

All operators and targets: ``tools/attributes_by_target.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

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
