from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import torch
from tests.accuracy.conftest import Case

import backquant
from backquant.accuracy.sensitivity import sensitivities
from backquant.accuracy.twin import Twin


class Page(HTMLParser):
    VOID = frozenset({"meta"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_pages_draw_every_operator(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["trace"]
    found = backquant.compare(case.model, case.quantized, case.data)
    found.save_html(tmp_path / "compare.html")
    text = (tmp_path / "compare.html").read_text(encoding="utf-8")
    page = Page(text)
    assert "built-in" not in text and "values -" in text
    drawn = {given["data-node"] for tag, given in page.attributes if given.get("class") == "box"}
    assert drawn == {row.node for row in found.rows}
    worst = [given for tag, given in page.attributes if given.get("class") == "panel figure"]
    assert len(worst) == 10
    links = {given["data-node"] for tag, given in page.attributes if tag == "a"}
    assert links == drawn
    assert not any("src" in given for tag, given in page.attributes)

    costs = sensitivities(Twin(case.ready.prepared, case.ready.reference()), case.data[:1])
    drawn = {g["data-node"] for _, g in Page(costs.to_html()).attributes if g.get("class") == "box"}
    assert drawn == set(costs.nodes)


def test_the_page_of_a_search_has_round_ticks() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    found = backquant.search(model, [torch.randn(32, 64)], budget={"min_sqnr": 25}, times=None)
    text = found.to_html()
    Page(text)
    ticks = [float(word) for word in re.findall(r"<text [^>]*>([\d.e+-]+)</text>", text)]
    top, bottom = 34.0, 340.0
    [line] = (g for _, g in Page(text).attributes if g.get("class") == "limit")
    assert top < float(str(line["y1"])) < bottom  # the budget, below all that was found
    assert ticks == [float(f"{tick:.2g}") for tick in ticks] and len(ticks) >= 6

    timed = replace(found.budget, min_sqnr=None, max_ratio=1.0)
    exact = {"front": found.front, "trials": found.trials}
    exact = {
        kind: tuple(replace(one, loss=1e-12) for one in these) for kind, these in exact.items()
    }
    Page(replace(found, budget=timed, **exact).to_html())  # 120 dB: beyond what is drawn
