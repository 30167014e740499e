"""The pytest plugin that writes a JSON line per finished test to ``TORCH_OWN_RESULTS``, and runs none twice.

``TORCH_OWN_BASE`` is the file that stands for ``torch.testing._internal.common_quantization``, on whose
helpers the tests call ``prepare_fx`` and ``convert_fx``: the installed one with the same edits.
``TORCH_OWN_PART`` is two numbers: which part of the tests this process runs, of how many.
``TORCH_OWN_AGAIN`` is an outcome that counts as none.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import benchmarks.stock  # noqa: F401  # torchvision, which the tests import, needs its operators' schemas

__all__: list[str] = []

_PATH = Path(os.environ.get("TORCH_OWN_RESULTS", os.devnull))
_BASE = "torch.testing._internal.common_quantization"
_failed: set[str] = set()


def pytest_configure() -> None:
    """Tests import the edited base class under its own name."""
    path = os.environ.get("TORCH_OWN_BASE")
    if path:
        spec = importlib.util.spec_from_file_location(_BASE, path)
        assert spec is not None and spec.loader is not None
        sys.modules[_BASE] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[_BASE])


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Methods of classes that have no outcome yet, of this process's part."""
    part, parts = map(int, os.environ.get("TORCH_OWN_PART", "0 1").split())
    lines = _PATH.read_text().splitlines() if _PATH.is_file() else []
    outcomes = {outcome["test"]: outcome["outcome"] for outcome in map(json.loads, lines)}
    again = os.environ.get("TORCH_OWN_AGAIN")
    known = {test for test, outcome in outcomes.items() if outcome != again}
    methods = [item for item in items if item.cls is not None and _name(item.nodeid) not in known]
    items[:] = methods[part::parts]


def pytest_runtest_logreport(report: Any) -> None:
    """One line per test: passed, failed (with the last line of the error) or skipped."""
    if report.failed:
        if report.nodeid not in _failed:
            _write(report.nodeid, "failed", _error(report), str(report.longrepr)[-6000:])
        _failed.add(report.nodeid)
    elif report.skipped:
        _write(report.nodeid, "skipped", str(report.longrepr[2] if report.longrepr else ""))
    elif report.when == "call" and report.nodeid not in _failed:
        _write(report.nodeid, "passed", "")


def _error(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash is not None else str(report.longrepr)).strip()


def _name(nodeid: str) -> str:
    return ".".join(nodeid.split("::")[1:])


def _write(nodeid: str, outcome: str, why: str, trace: str = "") -> None:
    line = {"test": _name(nodeid), "outcome": outcome, "why": why, "trace": trace}
    with _PATH.open("a") as file:  # one write of one line: parts do not mix theirs
        file.write(json.dumps(line) + "\n")
