from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "audit.py"
WELL = {"name": "numpy", "version": "2.4.6", "vulns": []}
BAD = {"name": "torch", "version": "1.0", "vulns": [{"id": "CVE-1", "fix_versions": ["1.1"]}]}
UNKNOWN = {"name": "odd", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("output", "status", "words"),
    [
        ([WELL], 0, "1 of 1 versions looked up, 0 known"),
        ([WELL, BAD], 1, "torch 1.0: CVE-1, mended in 1.1"),
        ([WELL, UNKNOWN], 2, "odd: not looked up: not found"),
        ([BAD, UNKNOWN], 1, "1 of 2 versions looked up, 1 known"),
        ([], 2, "0 of 0"),
        (None, 2, "nothing was looked up: requests.ConnectionError: no network"),
    ],
)
def test_what_is_known_and_what_is_not(
    output: Any, status: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    spec = importlib.util.spec_from_file_location("audit", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = "" if output is None else json.dumps({"dependencies": output})
    said = "Traceback (most recent call last):\nrequests.ConnectionError: no network"
    done = subprocess.CompletedProcess([], 1, text, said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert tool.main(["constraints.txt"]) == status
    assert words in capsys.readouterr().out
