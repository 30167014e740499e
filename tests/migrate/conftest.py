"""Helpers of the migration tests. The corpus is data: its scripts are neither tests nor imported."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from backquant.migrate import FileResult, migrate_source

collect_ignore_glob = ["corpus/*"]


@pytest.fixture
def corpus() -> Path:
    return Path(__file__).parent / "corpus"


@pytest.fixture
def migrated() -> Callable[[str], FileResult]:
    """Migrate a snippet, and check what holds for every migration: the result is Python, and
    migrating it again changes nothing."""

    def run(code: str) -> FileResult:
        result = migrate_source(dedent(code).lstrip("\n"), "a.py")
        ast.parse(result.after)
        again = migrate_source(result.after, "a.py")
        assert again.after == result.after
        return result

    return run


@pytest.fixture
def becomes(migrated: Callable[[str], FileResult]) -> Callable[..., None]:
    """Assert what a snippet becomes, and the (line, kind) of what is left to a person."""

    def check(before: str, after: str, findings: list[tuple[int, str]] | None = None) -> None:
        result = migrated(before)
        assert result.after == dedent(after).lstrip("\n")
        assert [(f.line, f.kind) for f in result.findings] == (findings or [])

    return check
