from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "random_graphs.py"


@pytest.fixture
def tool(monkeypatch):
    spec = importlib.util.spec_from_file_location("random_graphs", TOOL)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    return module


def row(key, verdict="equal", causes=()):
    seed, backend = key
    return {
        "seed": seed,
        "backend": backend,
        "verdict": verdict,
        "causes": list(causes),
        "detail": "it differs" if verdict == "unexplained" else "",
        "kernels": 3,
        "lowered": "bit-equal" if verdict == "equal" else None,
    }


def test_models_are_compared(tool, capsys):
    asked = ["--count", "3", "--seed", "7", "--backends", "x86", "--jobs", "1"]
    assert tool.main(asked) == 0
    printed = capsys.readouterr()
    assert "x86" in printed.out
    assert "random graphs" in printed.err  # the bar


def test_what_is_known_is_not_run_again(tool, tmp_path, monkeypatch, capsys):
    path, ran = tmp_path / "new" / "rows.jsonl", []

    def run(key):
        ran.append(key)
        return row(key, "explained", ["one", "two"])

    monkeypatch.setattr(tool, "run", run)
    asked = ["--backends", "x86,onednn", "--jobs", "1", "--results", str(path)]
    assert tool.main([*asked, "--count", "2"]) == 0
    assert ran == [(0, "x86"), (0, "onednn"), (1, "x86"), (1, "onednn")]
    first = path.read_text()
    path.write_text(first[: first.rindex("\n") - 9])  # stopped within the last line
    ran.clear()
    assert tool.main([*asked, "--count", "3"]) == 0
    assert ran == [(1, "onednn"), (2, "x86"), (2, "onednn")]
    ran.clear()
    assert tool.main([*asked, "--count", "3"]) == 0
    assert ran == []
    assert {json.loads(line)["seed"] for line in path.read_text().splitlines()[4:]} == {1, 2}
    out = capsys.readouterr().out
    assert "one" in out
    assert "the only cause" in out


def test_what_has_no_cause_is_printed(tool, monkeypatch, capsys):
    monkeypatch.setattr(tool, "run", lambda key: row(key, "unexplained" if key[0] else "equal"))
    assert tool.main(["--count", "2", "--backends", "fbgemm", "--jobs", "1"]) == 1
    assert "seed 1, fbgemm: it differs" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--backends", "x86,tpu"], ["--count", "0"], ["--jobs", "0"]])
def test_bad_usage(tool, wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        tool.main(wrong)
    assert stopped.value.code == 2
    assert "error" in capsys.readouterr().err
