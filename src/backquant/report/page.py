"""The page of a report: ``html`` says what stands on it, this what it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backquant.markup import Child, Element, table, tag
from backquant.report.grouping import Refusal
from backquant.report.layout import BOX_HEIGHT, BOX_WIDTH
from backquant.report.model import ReasonRow, Report, Row
from backquant.report.paragraphs import Paragraph, Part
from backquant.report.share import percent

STATES = {
    "quantized": "quantized",
    "integers": "float, run on integers",
    "float": "float",
}


@dataclass(frozen=True)
class States:
    """How many operators have each state, those that none has left out."""

    counts: Mapping[str, int]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> States:
        """Those of ``rows``."""
        return cls({state: sum(row.state == state for row in rows) for state in STATES})

    def each(self) -> Iterator[tuple[str, int]]:
        """State and count."""
        return ((state, count) for state, count in self.counts.items() if count)

    def tags(self) -> Iterator[Element]:
        """A label each."""
        return (
            tag("span", f"{n} {STATES[state]}", class_=f"tag {state}") for state, n in self.each()
        )

    def buttons(self) -> Iterator[Element]:
        """A button each, that shows and hides their rows."""
        return (
            _button(STATES[state], data_state=state, aria_pressed="true")
            for state, _ in self.each()
        )


def bar(what: str, shares: Mapping[str, float], label: str) -> Element:
    """Shares of ``what`` by state, as a bar that says what it counts."""
    parts = [tag("i", class_=state, style={"flex": part}) for state, part in shares.items()]
    names = (f"{percent(part)} {STATES[state]}" for state, part in shares.items())
    caption = tag("p", soft(f"{what}: {', '.join(names)}"), class_="caption")
    return tag("div", caption, tag("div", *parts, class_="bar", role="img", aria_label=label))


def header(
    report: Report,
    title: str,
    shortfall: str,
    cards: Iterable[tuple[str, str, str]],
    shares: Element,
    next_step: str,
) -> Element:
    """Name, what went wrong, numbers, shares, what to do next."""
    engine = f", {report.engine}" if report.engine else ", reference model"
    return tag(
        "header",
        tag("h1", f"{title} ", tag("span", f"on {report.backend}{engine}")),
        *([tag("p", f"This model {shortfall}.", class_="warning")] if shortfall else []),
        card_row(cards),
        shares,
        tag("p", tag("b", "Next: "), next_step, class_="next"),
    )


def card_row(cards: Iterable[tuple[str, str, str]]) -> Element:
    """Numbers with a title and a remark."""
    shown = (
        tag("div", soft(title), tag("b", value), soft(remark), class_="card")
        for title, value, remark in cards
    )
    return tag("div", *shown, class_="cards")


def soft(text: str) -> Element:
    """Text in a lighter colour."""
    return tag("span", text, class_="soft")


def costs(items: Iterable[Mapping[str, Any]], free: str) -> Iterator[Element]:
    """What stays float, by cost; the first with advice."""
    rows = [_cost(item, advises=index == 0) for index, item in enumerate(items)]
    if free:
        words = soft(f"without multiply-adds: {free}")
        rows.append(tag("div", tag("b", "0.0%"), tag("span", class_="meter"), words, class_="cost"))
    if rows:
        yield tag("h2", "What stays float, by cost")
        yield tag("div", *rows, class_="panel costs")


def _cost(item: Mapping[str, Any], *, advises: bool) -> Element:
    advice = tag("code", item["advice"], class_="advice") if advises and item["advice"] else None
    words = soft(f"{item['operator']}: {item['rule']}")
    return tag(
        "div",
        tag("b", item["share"]),
        tag("span", tag("i", style={"width": item["width"]}), class_="meter"),
        tag("span", _node(item["label"], item["node"]), " ", words, advice),
        class_="cost",
    )


def _node(text: str, node: str) -> Element:
    """A link to an operator of the drawing, which the script follows."""
    return tag("a", text, class_="node", data_node=node)


def _button(text: str, **attributes: str) -> Element:
    return tag("button", text, type="button", **attributes)


def drawn(
    boxes: Iterable[Mapping[str, Any]],
    edges: Iterable[Mapping[str, str]],
    size: tuple[float, float],
) -> Element:
    """The graph, with what moves it, beside the details of an operator."""
    shapes = [
        tag("path", class_="edge", data_from=edge["source"], data_to=edge["target"], d=edge["path"])
        for edge in edges
    ]
    placed = [_box(box) for box in boxes]
    canvas = tag(
        "svg",
        tag("g", *shapes, *placed, id="view"),
        id="canvas",
        data_width=size[0],
        data_height=size[1],
        role="img",
        aria_label=f"graph of {len(placed)} operators",
    )
    overview = tag("svg", id="overview", preserveAspectRatio="none", aria_hidden="true")
    return tag("div", canvas, overview, class_="stage")


def _box(box: Mapping[str, Any]) -> Element:
    return tag(
        "g",
        tag("rect", width=BOX_WIDTH, height=BOX_HEIGHT),
        tag("text", box["title"], x=BOX_WIDTH / 2, y=17),
        tag("text", box["subtitle"], class_="sub", x=BOX_WIDTH / 2, y=31),
        class_=f"box {box['state']}",
        data_node=box["node"],
        transform=f"translate({box['x']},{box['y']})",
    )


def graph(states: States, stage: Element) -> Iterator[Element]:
    """The drawing under its legend, beside the details."""
    zoom = tag(
        "span",
        _button("−", id="out", aria_label="zoom out"),
        _button("+", id="in", aria_label="zoom in"),
        _button("fit", id="fit"),
        class_="end",
    )
    legend = tag("div", *states.tags(), zoom, class_="legend")
    nothing = tag("p", "This model has no operators.", class_="soft")
    detail = tag("div", nothing, class_="panel", id="detail")
    yield tag("h2", "The graph")
    yield tag("div", tag("div", legend, stage, class_="panel"), detail, class_="split")


def refused(paragraphs: Iterable[Paragraph], backend: str) -> Iterator[Element]:
    """What stays float, and why."""
    cards = [_paragraph(paragraph, backend) for paragraph in paragraphs]
    if cards:
        yield tag("h2", "What stays float, and why")
        yield tag("div", *cards, class_="refusals")


def _paragraph(paragraph: Paragraph, backend: str) -> Element:
    several = len(paragraph.refusals) > 1
    head = [paragraph.title] if several else _operators(paragraph.refusals[0])
    no_entry = f"{backend} has no entry for any of these" if paragraph.has_no_entry else ""
    terms = [
        term
        for reason in paragraph.reasons
        for term in _reason(reason, rule=paragraph.rule, admitted=no_entry)
    ]
    parts = _parts(paragraph) if several else ()
    kind = "refusal wide" if several else "refusal"
    return tag("div", tag("h3", *head), tag("dl", *terms), *parts, class_=kind)


def _parts(paragraph: Paragraph) -> Iterator[Element]:
    """The operators; those whose reasons differ under what differs."""
    lists: list[tuple[str, list[Part]]] = []
    for part in paragraph.parts:
        differing = paragraph.differing(part)
        if differing or not lists:
            lists.append((differing, []))
        lists[-1][1].append(part)
    for differing, parts in lists:
        if differing:
            yield tag("p", differing, class_="part")
        items = (tag("li", *_operators(refusal)) for part in parts for refusal in part.refusals)
        yield tag("ul", *items, class_="kinds")


def _operators(refusal: Refusal) -> list[Child]:
    return [_node(refusal.label, refusal.nodes[0]), " ", soft(refusal.operator)]


def _reason(reason: ReasonRow, *, rule: str = "", admitted: str = "") -> Iterator[Element]:
    place: list[Child] = [" ", soft(reason.place)] if reason.place else []
    by: list[Child] = [" ", soft(f"QConfigMapping: {rule}")] if rule else []
    yield from _term("why", reason.rule, *by)
    if reason.asked:
        yield from _term("requested", reason.asked)
    if admitted:
        yield from _term("supported", admitted)
    elif reason.admitted:
        yield from _term("supported", reason.admitted, *place)
    elif reason.place:
        yield from _term("where", reason.place)
    if reason.fix:
        yield tag("dt", "fix")
        yield tag("dd", reason.fix, class_="fix")


def _term(name: str, *value: Child) -> tuple[Element, Element]:
    return tag("dt", name), tag("dd", *value)


def without_kernel(reasons: Iterable[ReasonRow]) -> Iterator[Element]:
    """Quantized operators that no integer kernel computes."""
    cards = [
        tag(
            "div",
            tag("h3", _node(reason.node or reason.rule, reason.node)),
            tag("dl", *_reason(reason)),
            class_="refusal",
        )
        for reason in reasons
    ]
    if cards:
        yield tag("h2", "Quantized, and without an integer kernel")
        yield tag("div", *cards, class_="refusals")


def kernels(counts: Mapping[str, int]) -> Iterator[Element]:
    """How often each kernel runs."""
    if counts:
        shown = (
            tag("span", tag("b", f"{count}×"), tag("code", kernel))
            for kernel, count in counts.items()
        )
        yield tag("h2", "Kernels")
        yield tag("div", *shown, class_="kernels")


def operators(report: Report, states: States, *, has_rules: bool) -> Iterator[Element]:
    """The table, and what filters it."""
    words = "filter: name, operator, entry, kernel"
    search = tag(
        "input", id="search", type="search", placeholder=words, aria_label="filter operators"
    )
    count = tag("span", id="count", class_="soft")
    rows, samples = report.operators, report.samples
    most = max((row.multiply_adds for row in rows), default=0) or 1
    heads: list[Child] = ["node", "operator", "outcome", *(["rule"] if has_rules else [])]
    heads += ["output qparams", "kernel", tag("th", "multiply-adds per sample", class_="number")]
    lines = (_row(row, most, samples, has_rules=has_rules) for row in rows)
    yield tag(
        "details",
        tag("summary", tag("h2", f"All operators ({len(rows)})")),
        tag("div", search, *states.buttons(), count, class_="tools"),
        tag("div", table(heads, lines), class_="panel scroll"),
        id="operators",
    )


def _row(row: Row, most: int, samples: int, *, has_rules: bool) -> Element:
    inside = row.entry and row.entry != row.operator
    share = tag("i", style={"width": round(100 * row.multiply_adds / most, 1)})
    within: list[Child] = [" ", soft(f"in {row.entry}")] if inside else []
    counted: list[Child] = [f"{row.multiply_adds // samples:,}", share] if row.multiply_adds else []
    cells = [
        tag("td", row.node),
        tag("td", row.operator, *within),
        tag("td", tag("span", STATES[row.state], class_=f"tag {row.state}")),
        *([tag("td", row.rule)] if has_rules else []),
        tag("td", row.output.short if row.output else "", class_="tight"),
        tag("td", row.kernel),
        tag("td", *(["? "] if row.uncounted else []), *counted, class_="number"),
    ]
    return tag("tr", *cells, data_node=row.node, data_state=row.state)


def groups(titled: Iterable[tuple[str, list[str]]]) -> Iterator[Element]:
    """What did nothing, each kind under a title that opens."""
    parts = [
        tag(
            "details",
            tag("summary", f"{title} ", soft(f"({len(lines)})")),
            tag("ul", *(tag("li", line) for line in lines)),
        )
        for title, lines in titled
    ]
    if parts:
        yield tag("h2", "Notes and unused rules")
        yield from parts
