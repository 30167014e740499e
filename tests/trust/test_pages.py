"""Pages with hostile names, read back by a parser of HTML and by a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backquant.accuracy.comparison import Comparison, OperatorError
from backquant.backend_config import BackendConfig
from backquant.backend_config.derived import document_of
from backquant.conformance.results import Conformance, Tally, Verdict
from backquant.errors import printable
from backquant.pages.html import to_html
from backquant.pages.markup import Assets, Element, page, tag
from backquant.report.model import ObserverRow, ReasonRow, Report, Row

RUN = "document.title='ran';window.x=1"
ATTACKS = (
    f"</script><script>{RUN}</script>",
    f'</style><img src=x onerror="{RUN}">',
    f'" onload="{RUN}" style="x',
    f"' onmouseover='{RUN}",
    f"javascript:{RUN}",
    f"<svg onload={RUN}>",
    f"</title><script>{RUN}</script>",
    f"<!--<script>{RUN}//",
    f"]]><script>{RUN}</script>",
    "\u202e<b>\x00\ud800",
    "{{ x }}${x}`",
)
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Reader(HTMLParser):
    """Elements with their attributes, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def report(text: str) -> Report:
    observer = ObserverRow("output", text, "quint8", 0, 255, 0.5, 3, shared_with=(text,))
    reason = ReasonRow(text, text, text, text, text, text)
    rows = (
        Row(
            text,
            text,
            text,
            "quantized",
            entry=text,
            observers=(observer,),
            rule=f"module_name {text}",
        ),
        Row(
            "b" + text,
            text,
            text,
            "float",
            (text,),
            reasons=(reason,),
            multiply_adds=3,
            kernel=text,
        ),
    )
    return Report(
        text,
        model=text,
        engine=text,
        rows=rows,
        notes=(text,),
        kernels=(text,),
        unlowered=(reason,),
        unused_rules=(text,),
        unreached_entries=(text,),
        extras={"cards": [{"title": text, "value": text, "remark": text}]},
    )


def pages(text: str) -> dict[str, str]:
    errors = (OperatorError(text, (text,), text, text, text, False, 20.0, 20.0, 0.9, 0.1),)
    wrong = Tally(
        text,
        text,
        Counter([Verdict.WRONG]),
        Counter([text]),
        reasons={Verdict.WRONG: text},
    )
    return {
        "report": report(text).to_html(),
        "compare": Comparison(text, model=text, rows=errors).to_html(),
        "conformance": Conformance(
            text, text, {text: text}, tallies={(text, text): wrong}
        ).to_html(),
        "support": to_html(document_of(BackendConfig(text))),
    }


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(ATTACKS) | st.text(max_size=6), max_size=4).map("".join))
def test_text_comes_back_as_text(text: str) -> None:
    element = tag("div", tag("b", text), title=text, data_node=text, id=text)
    reader = Reader("".join(element.written()))
    [(_, attributes), (name, inner)] = reader.elements
    assert (name, inner) == ("b", {})
    shown = printable(text)
    assert attributes == {"title": shown, "data-node": shown, "id": shown}
    assert "".join(reader.texts).removesuffix("\n") == shown


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(ATTACKS) | st.text(max_size=6), max_size=4).map("".join))
def test_data_for_the_script_stays_in_its_element(text: str) -> None:
    written = page(text, Assets("pages", (), "page.js", {text: [text]}))
    reader = Reader(written)
    scripts = [attributes for name, attributes in reader.elements if name == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}]
    data = written.split('id="data">')[1].split("</script>")[0]
    assert json.loads(data) == {printable(text): [printable(text)]}


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("script", {}),
        ("iframe", {}),
        ("style", {}),
        ("a", {"href": "javascript:x"}),
        ("a", {"onclick": "x"}),
        ("b", {"style": "x:y"}),
        ("b", {"style": {"background": 1.0}}),
        ("b", {'x" onload': "y"}),
        ("b onload=x", {}),
    ],
)
def test_what_runs_or_loads_cannot_be_said(name: str, attributes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"no (element|attribute)"):
        Element(name, (), tuple(attributes.items()))  # type: ignore[arg-type]


@pytest.mark.parametrize("attack", ATTACKS)
def test_pages_of_hostile_names_have_no_elements_of_theirs(attack: str) -> None:
    harmless = pages("name")
    for kind, written in pages(attack).items():
        reader = Reader(written)
        assert [name for name, _ in reader.elements] == [
            name for name, _ in Reader(harmless[kind]).elements
        ]
        names = {key for _, attributes in reader.elements for key in attributes}
        assert not any(key.startswith("on") for key in names) and "src" not in names
        links = [attributes["href"] for _, attributes in reader.elements if "href" in attributes]
        assert all(str(link).startswith("#") for link in links)
        assert "Content-Security-Policy" in written


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_nothing_of_a_name_runs_in_a_browser(tmp_path: Path) -> None:
    """The pages of all attacks; their own script runs, which shows that scripts do."""
    shown = pages(" ".join(ATTACKS))
    shown["injected"] = shown["report"].replace("</main>", f"<script>{RUN}</script></main>")
    for kind, written in shown.items():
        place = tmp_path / f"{kind}.html"
        place.write_text(written, encoding="utf-8")
        words = [
            str(BROWSER),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            place.as_uri(),
        ]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
        assert "<title>ran</title>" not in done.stdout
        if kind in ("report", "injected"):
            assert "2 of 2" in done.stdout  # written by the page's own script
