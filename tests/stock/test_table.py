"""The page of stock models: what it shows is read back, so that single cells can be measured again."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.stock.catalogue import catalogue

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_read_back(monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    from stock_table import commits_of, rows_of, table

    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = rows_of(page)
    assert len(rows) > 400
    assert {row["outcome"] for row in rows.values()} == {"ok", "failed"}
    again = table(list(catalogue().values()), rows, {}, commits_of(page))
    named = page.partition(" with torch")  # versions are those that are installed
    assert again.startswith(named[0])
    assert again.partition("| road |")[2] == page.partition("| road |")[2]
    key = ("torchvision.resnet18", "kernels")
    entries = list(catalogue().values())
    changed = table(entries, rows | {key: {"outcome": "ok", "share": 0.5}}, {})
    assert "|torchvision.resnet18|50%|" in changed
    failed = {"outcome": "failed", "error": "Error: raw"}
    changed = table(entries, rows | {key: failed}, {key[0]: {key[1]: "Error: why"}})
    assert "| x86 | Error: why | torchvision.resnet18 |" in changed
