"""The tutorials run from top to bottom; what they show they assert."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "tutorials"
TUTORIALS = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_it_is_a_notebook(path: Path) -> None:
    """jupytext's form: cells, the first with a title, and something asserted."""
    text = path.read_text(encoding="utf-8")
    assert re.match(r"# %% \[markdown\]\n# # \S", text) and text.count("\n# %%") >= 4
    assert "\nassert " in text


def test_each_is_listed() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\w+)\.py\)", page)) == {path.stem for path in TUTORIALS}
