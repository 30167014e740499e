from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from backquant.deploy.tensorrt import RULES

TOOL = Path(__file__).resolve().parents[2] / "tools" / "generate_tensorrt_docs.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("generate_tensorrt_docs", TOOL)
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def test_committed_table_is_current(tool, capsys) -> None:
    assert tool.main(["--check"]) == 0, capsys.readouterr().out


def test_every_rule_has_a_row(tool) -> None:
    rows = tool.table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [rule.id for rule in RULES]


def test_stale_page_is_found_and_mended(tool, tmp_path, monkeypatch, capsys) -> None:
    copy = tmp_path / "deploy-tensorrt.md"
    copy.write_text(tool.PAGE.read_text(encoding="utf-8").replace("zero-point", "zero-pint"))
    monkeypatch.setattr(tool, "PAGE", copy)
    assert tool.main(["--check"]) == 1 and "stale" in capsys.readouterr().out
    assert tool.main([]) == 0 and tool.main(["--check"]) == 0


def test_page_without_marks_and_unknown_words(tool) -> None:
    with pytest.raises(SystemExit, match="lacks the marks"):
        tool.page("nothing")
    assert tool.main(["--chekc"]) == 2
