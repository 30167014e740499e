"""The pytest plugin that writes one JSON line per finished test to ``TORCH_OWN_RESULTS``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import benchmarks.stock  # noqa: F401  # torchvision, which the tests import, needs its operators' schemas
import pytest

from torch_own.excluded import reason_to_exclude
from torch_own.judge import NOTED

__all__: list[str] = []

_PATH = Path(os.environ.get("TORCH_OWN_RESULTS", os.devnull))
_failed: set[str] = set()


def _name(nodeid: str) -> str:
    return ".".join(nodeid.split("::")[1:])


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Tests that are excluded do not run."""
    kept, left_out = [], []
    for item in items:
        (left_out if reason_to_exclude(_name(item.nodeid)) else kept).append(item)
    for item in left_out:
        _write(item.nodeid, "excluded", reason_to_exclude(_name(item.nodeid)) or "")
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_runtest_setup() -> None:
    """What graphs were like is noted anew for each test."""
    NOTED.clear()


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


def _write(nodeid: str, outcome: str, why: str, trace: str = "") -> None:
    line: dict[str, Any] = {"test": _name(nodeid), "outcome": outcome, "why": why, "trace": trace}
    line["graph"] = list(NOTED) if outcome in ("passed", "failed") else []
    with _PATH.open("a") as file:
        file.write(json.dumps(line) + "\n")
