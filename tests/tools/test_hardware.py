"""What documented hardware asks: each constraint can be said, is enforced, honoured and explained."""

from __future__ import annotations

import pytest
from tools.hardware.row import Row
from tools.hardware.rows import ROWS
from tools.hardware.table import CELLS, PAGE, section, tried


@pytest.mark.xdist_group("hardware")  # the models of a row are made once
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_cell(row: Row, cell: str) -> None:
    tried(row, cell)
    if cell == "message":
        assert section(row) in PAGE.read_text(encoding="utf-8"), "python -m tools.hardware.table"
