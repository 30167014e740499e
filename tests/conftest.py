"""Session-wide rules: fixed seeds, one thread, and no skipped test that is not on the list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ALLOWED_SKIPS = Path(__file__).parent / "allowed_skips.txt"


def _allowed() -> set[str]:
    lines = ALLOWED_SKIPS.read_text(encoding="utf-8").splitlines()
    return {line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()}


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Turn a skip that ``allowed_skips.txt`` does not list into a failure."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.skipped and not hasattr(report, "wasxfail") and item.nodeid not in _allowed():
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped but is not in tests/allowed_skips.txt"


def pytest_configure() -> None:
    torch.set_num_threads(1)
