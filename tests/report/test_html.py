from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from backquant.report.model import ObserverRow, ReasonRow, Report, Row

EVIL = "</script><img src=x onerror=alert(1)>"
SHARED = ObserverRow("output", "a", "quint8", 0, 255, 0.5, 3, shared_with=("c",))


def page_of(**changes: object) -> str:
    rows = (
        Row("a", "Conv2d", "a", "quantized", entry="Conv2d", observers=(SHARED,), multiply_adds=10),
        Row("b", EVIL, "b", "float", ("a",), reasons=(ReasonRow("r", EVIL, "x", EVIL),)),
        Row("c", "relu", "", "float", ("b",), kernel="aten.clamp"),
    )
    return replace(Report("x86", rows=rows), **changes).to_html()  # type: ignore[arg-type]


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*)</script>', page)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


class Balanced(HTMLParser):
    """Collects what is left open, and text by element."""

    VOID = ("meta", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.text.setdefault(self.open[-1], []).append(data.strip())


def test_every_element_is_closed() -> None:
    parser = Balanced()
    parser.feed(page_of())
    assert parser.open == []


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = page_of()
    assert not re.search(r'(src|href)\s*=\s*"', page)
    assert "@import" not in page and "url(" not in page
    assert re.findall(r"https?://[^\"]*", page) == [
        "http://www.w3.org/2000/svg"
    ]  # a name, not a place
    assert "default-src 'none'" in page and "'unsafe-inline'; base-uri" in page


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"notes": (EVIL,), "unused_rules": (EVIL,), "unreached_entries": (EVIL,)},
        {"backend": EVIL, "model": EVIL, "engine": EVIL},
        {"kernels": (EVIL,)},
        {"unlowered": (ReasonRow(EVIL, EVIL, EVIL, EVIL, EVIL, EVIL),)},
        {"extras": {"cards": [{"title": EVIL, "value": EVIL, "remark": EVIL}]}},
        {
            "rows": (
                Row(
                    EVIL,
                    EVIL,
                    EVIL,
                    "quantized",
                    rule="module_name " + EVIL,
                    kernel=EVIL,
                    fused=(EVIL,),
                ),
            )
        },
    ],
    ids=lambda changes: "+".join(changes) or "rows",
)
def test_names_from_a_model_cannot_become_markup(changes: dict[str, object]) -> None:
    page = page_of(**changes)
    assert "<img" not in page
    assert page.count("</script>") == 2  # data, and what shows them
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []


def test_every_operator_is_drawn_and_listed() -> None:
    page = page_of()
    assert page.count('class="box ') == page.count("<tr data-node=") == 3
    assert page.count('class="edge"') == 2
    assert [page.count(f'class="box {state}"') for state in ("quantized", "float", "integers")] == [
        1,
        1,
        1,
    ]


def test_a_click_shows_everything_about_an_operator() -> None:
    data = data_of(page_of())
    details = data["details"]
    assert ["output", "quint8 [0, 255], scale 0.5, zero point 3\nshared with c"] in details["a"]
    assert ["why float", "r"] in details["b"] and ["fix", EVIL] in details["b"]
    assert ["outcome", "float, run on integers"] in details["c"]
    assert data["kin"] == {"a": ["c"]}


def test_what_stays_float_is_shown_first() -> None:
    assert data_of(page_of())["first"] == "b"
    rows = (Row("x", "add", "", "quantized"), Row("y", "fc", "", "quantized", multiply_adds=3))
    assert data_of(page_of(rows=rows))["first"] == "y"
    assert data_of(page_of(rows=()))["first"] is None


def test_the_summary_numbers() -> None:
    page = page_of(
        float_bytes=4_000_000,
        quantized_bytes=1_000_000,
        extras={"cards": [{"title": "t", "value": "v9"}]},
    )
    parser = Balanced()
    parser.feed(page)
    assert parser.text["b"][:4] == ["4.0× smaller", "10", "v9", "next"]


def test_an_empty_report_is_a_page() -> None:
    page = Report("x86").to_html()
    assert "<svg" in page and "reference model" in page


def test_saving_makes_folders_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "report.html"
    for _ in range(2):
        Report("x86").save_html(target)
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [p.name for p in target.parent.iterdir()] == ["report.html"]


def test_edges_lead_through_what_is_no_operator() -> None:
    """An attention layer gives a tuple; what reads its first item reads the layer."""
    rows = (
        Row("attention", "MultiheadAttention", "attention", "float"),
        Row("getitem", "operator.getitem", "", "not_tensor", ("attention",)),
        Row("fc", "Linear", "fc", "quantized", ("getitem",)),
    )
    page = Report("x86", rows=rows).to_html()
    assert 'data-from="attention" data-to="fc"' in page
    assert 'data-node="getitem"' not in page
