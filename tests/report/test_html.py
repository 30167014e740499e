from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from backquant.report.html import render_html, save_html
from backquant.report.model import ReasonRow, Report, Row

EVIL = "</script><img src=x onerror=alert(1)>"


def page_of(**changes: object) -> str:
    row = Row("a", "Conv2d", "a", "quantized")
    refused = Row("b", EVIL, "b", "float", ("a",), reasons=(ReasonRow("r", EVIL, "x", EVIL),))
    return render_html(replace(Report("x86", rows=(row, refused)), **changes))  # type: ignore[arg-type]


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = page_of()
    assert not re.search(r'(src|href)\s*=\s*"', page)
    assert "http" not in page and "@import" not in page


def test_names_from_a_model_cannot_become_markup() -> None:
    page = page_of(notes=(EVIL,), unused_rules=(EVIL,))
    assert "<img" not in page
    assert page.count("</script>") == 1


def test_every_operator_is_drawn_and_listed() -> None:
    page = page_of()
    assert page.count('class="box ') == 2
    assert page.count("<tr data-node=") == 2
    assert page.count('class="edge"') == 1


def test_an_empty_report_is_a_page() -> None:
    assert "<svg" in render_html(Report("x86"))


def test_saving_makes_folders_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "report.html"
    save_html(Report("x86"), target)
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [p.name for p in target.parent.iterdir()] == ["report.html"]
