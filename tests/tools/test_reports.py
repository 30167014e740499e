from __future__ import annotations

import pytest
from tools.reports import FLOWS, KINDS, outcome


@pytest.mark.parametrize("flow", FLOWS)
def test_cells(flow: str) -> None:
    """Of a kind that works, one that loses parts, and one that is refused."""
    found = [
        outcome(KINDS[kind], flow, "onnxruntime")
        for kind in ("joined parts 1:1", "joined parts 200:1", "infinite bias")
    ]
    assert found[0] == "ok" and found[1] in ("ok", "said") and found[2] == "refused"
