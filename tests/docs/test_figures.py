"""Figures of README.md and docs/support.md are those of the files that they come from."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    import figures as tool

    return tool


def test_each_figure_is_that_of_its_file(figures) -> None:
    assert {name for names in figures.PAGES.values() for name in names} == set(figures.FIGURES)
    for page, names in figures.PAGES.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert tuple(name for _, name, _, _ in figures.BLOCK.findall(text)) == names
        assert figures.written(page) == text


def test_another_figure_is_noticed(figures, monkeypatch, tmp_path: Path, capsys) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text(re.sub(r"geometric mean.*", "none", text), encoding="utf-8")
    for name in ("docs", "benchmarks", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    assert figures.main() == 1
    assert capsys.readouterr().out.startswith("README.md: figures differ")
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    assert figures.main() == 0
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == text


def test_speeds_outside_of_the_table_say_where_they_come_from() -> None:
    """README has no second figure for the same thing: speeds and decibels stand in its tables alone."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"<!-- figures.*?/figures -->", "", text, flags=re.DOTALL)
    assert not re.findall(r"\d(?:\.\d+)? ?(?:×|times|dB)", prose)


def test_one_version() -> None:
    from backquant.version import __version__

    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in cited
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{__version__}]" in log
    releases = re.split(r"^## \[", log, flags=re.MULTILINE)[1:]
    assert max(release.count("\n") for release in releases) <= 150
    assert f"\n{__version__}, " in (ROOT / "README.md").read_text(encoding="utf-8")
