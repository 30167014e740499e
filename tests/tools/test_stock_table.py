"""The page of stock models is made from results, each cell from its last one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from benchmarks.stock.entry import Entry
from torch import nn

TOOL = Path(__file__).resolve().parents[2] / "tools" / "stock_table.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("stock_table", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ENTRIES = [
    Entry("one", "CNN", nn.ReLU, torch.zeros),
    Entry("two", "CNN", nn.ReLU, torch.zeros),
    Entry("three", "speech", nn.ReLU, torch.zeros),
]
ROWS = {
    ("one", "kernels"): {"outcome": "ok", "share": 0.5, "sqnr": 31.4, "speed": 2.04, "commit": "a"},
    ("one", "saved"): {"outcome": "ok", "share": None, "sqnr": None, "commit": "a"},
    ("two", "kernels"): {
        "outcome": "failed",
        "error": "UsageError: no | way\n  where",
        "commit": "b",
    },
}


def test_cells_say_what_was_measured(tool) -> None:
    page = tool.table(ENTRIES, ROWS, {})
    assert "|one|50%·31·2.0×|–|–|✓|–|–|–|–|–|–|" in page
    assert "|two|✗|–|–|–|–|–|–|–|–|–|" in page
    assert "three" not in page  # nothing of it was run
    assert "| x86 | 2 | 1 | 1 |" in page
    assert "| ONNX Runtime | 0 | 0 | 0 |" in page
    assert "`a`, `b`" in page


def test_failures_have_reasons(tool) -> None:
    assert "| x86 | UsageError: no \\| way | two |" in tool.table(ENTRIES, ROWS, {})
    known = {"two": {"kernels": "UsageError: in our words"}}
    assert "| x86 | UsageError: in our words | two |" in tool.table(ENTRIES, ROWS, known)


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="no family 'cnn'"):
        Entry("four", "cnn", nn.ReLU, torch.zeros)
