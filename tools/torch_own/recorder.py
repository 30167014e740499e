"""The pytest plugin that writes one JSON line per finished test to ``TORCH_OWN_RESULTS``.

``TORCH_OWN_BASE`` is the file that stands for ``torch.testing._internal.common_quantization``, on whose
helpers the tests call ``prepare_fx`` and ``convert_fx``: the installed one with the same edits.
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
    name = ".".join(nodeid.split("::")[1:])
    line = {"test": name, "outcome": outcome, "why": why, "trace": trace}
    with _PATH.open("a") as file:
        file.write(json.dumps(line) + "\n")
