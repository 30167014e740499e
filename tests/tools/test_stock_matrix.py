"""The tool that fills the page of stock models: each cell ends, whatever its process does."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks.stock.entry import Entry
from benchmarks.stock.roads import Outcome
from torch import nn

TOOL = Path(__file__).resolve().parents[2] / "tools" / "stock_matrix.py"
ENTRY = Entry("one", "CNN", nn.ReLU, torch.zeros)


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("stock_matrix", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "quantized", lambda entry, setup: entry)
    return module


def _roads(monkeypatch, tool, **roads) -> None:
    monkeypatch.setattr(tool, "ROADS", roads)
    monkeypatch.setattr(tool, "SETUPS", dict.fromkeys(roads, "one setup"))


def good(made: Entry) -> Outcome:
    return Outcome(0.5, 31.0)


def wrong(made: Entry) -> Outcome:
    raise KeyError("no such thing")


def test_each_cell_of_a_process_has_its_outcome(tool, monkeypatch) -> None:
    def dies(made: Entry) -> Outcome:
        os._exit(3)

    def hangs(made: Entry) -> Outcome:
        time.sleep(600)
        raise AssertionError

    _roads(monkeypatch, tool, good=good, dies=dies, wrong=wrong, hangs=hangs, also=good)
    rows = {row["road"]: row for row in tool.within(ENTRY, list(tool.ROADS), 5.0)}
    assert {road: row["outcome"] for road, row in rows.items()} == {
        "good": "ok",
        "dies": "died",
        "wrong": "failed",
        "hangs": "timeout",
        "also": "ok",
    }
    assert rows["dies"]["error"] == "the process ended with 3"
    assert rows["wrong"]["error"] == "KeyError: 'no such thing'"
    assert rows["wrong"]["raw"]
    assert "wrong" in rows["wrong"]["trace"]
    assert (rows["good"]["share"], rows["good"]["sqnr"]) == (0.5, 31.0)


def test_a_run_goes_on_where_the_last_one_stopped(tool, monkeypatch, tmp_path) -> None:
    _roads(monkeypatch, tool, good=good, also=good, wrong=wrong)
    others = [Entry(name, family, nn.ReLU, torch.zeros) for name, family in (("two", "speech"),)]
    monkeypatch.setattr(tool, "catalogue", lambda: {e.name: e for e in (ENTRY, *others)})
    results = tmp_path / "results.jsonl"
    rows = [
        {"model": "one", "road": "good", "outcome": "ok"},
        {"model": "one", "road": "wrong", "outcome": "failed"},
    ]
    results.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def left(*arguments: str) -> list[tuple[str, list[str]]]:
        chosen = tool.options_of(["--results", str(results), *arguments])
        return [(entry.name, roads) for entry, roads in tool.wanted(chosen)]

    assert left() == [("one", ["also"]), ("two", ["good", "also", "wrong"])]
    assert left("--again", "failed", "--only", "ONE") == [("one", ["also", "wrong"])]
    assert left("--families", "speech", "--roads", "also") == [("two", ["also"])]
    assert left("--tested") == []


def test_cells_that_the_page_has_are_left_out(tool, tmp_path) -> None:
    page = tmp_path / "models.md"
    page.write_text("| model | x86 |\n| --- | --- |\n| rtdl.ResNet | 100% · 120 · 1.1× |\n")
    given = ["--out", str(page), "--results", str(tmp_path / "none"), "--only", "rtdl.ResNet"]
    options = tool.options_of([*given, "--roads", "kernels,saved", "--missing"])
    assert [(entry.name, roads) for entry, roads in tool.wanted(options)] == [
        ("rtdl.ResNet", ["saved"])
    ]


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--roads", "sea"], "sea"), (["--families", "cnn"], "cnn")]
)
def test_what_is_not_there_is_refused(tool, arguments, words, capsys) -> None:
    with pytest.raises(SystemExit):
        tool.options_of(arguments)
    assert words in capsys.readouterr().err
