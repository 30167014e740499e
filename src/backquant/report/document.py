"""What a report says, as a document: figures, what stays float by cost and why, the graph, all operators."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from backquant.pages import (
    Box,
    Card,
    Cell,
    Column,
    Document,
    Graph,
    Items,
    Listing,
    Note,
    Part,
    Section,
    Table,
    Term,
    Terms,
    letters_of,
)
from backquant.pages import Row as Line
from backquant.reason_codes import ReasonCode, remedy_of
from backquant.report.refusals import Paragraph, Refusal, by_cost, paragraphs, refusals
from backquant.report.rows import Facts, ObserverRow, ReasonRow, Row

# A report in words: whether the model is quantized, how accurate, fast and small it is, what to do next.


#: Decibels below which the outputs need a look.
LEAST_SQNR = 20.0
_MOSTLY_FLOAT = 0.5
_SHOWN_FLOAT = 0.1  # of the multiply-adds: what is worth a fix
_KINDS = 8  # operators without multiply-adds, by kind
_NOT_INTEGER = ("float16", "float8", "weight only")


def percent(part: float) -> str:
    """A share; no rounding to all or nothing.

    >>> percent(0.5), percent(0.99999), percent(1), percent(0.00001), percent(0), percent(math.nan)
    ('50.0%', '99.9%', '100.0%', '0.1%', '0.0%', 'unknown')
    """
    if math.isnan(part):
        return "unknown"
    if 0 < part < 1:
        part = min(max(part, 0.001), 0.999)
    return f"{part:.1%}"


def human_bytes(count: int) -> str:
    """Bytes in the unit a person would use.

    >>> human_bytes(1_230_000), human_bytes(4_200)
    ('1.23 MB', '4.2 kB')
    """
    return f"{count / 1e6:.2f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def amount(count: float) -> str:
    """A number of multiply-adds in a unit that a person would use.

    >>> amount(950), amount(1_814_073_344)
    ('950', '1.8 G')
    """
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f}"


def headline(report: Facts) -> str:
    """One line: which model, whether it is quantized, and how much of it.

    >>> rows = (Row("fc", "Linear", "fc", "float", multiply_adds=4),)
    >>> headline(Facts("x86", model="Net", rows=rows, lowered=True))
    'Net for x86 is in FLOAT: 0.0% of the multiply-adds on integers'
    """
    name = f"{report.model or 'model'} for {report.backend}"
    if short := shortfall(report):
        return f"{name} {short}"
    kind = "" if report.lowered else ", planned" if report.engine else ", reference model"
    return f"{name}{kind}: {share_text(report) or operator_counts(report)}"


def shortfall(report: Facts) -> str:
    """What is to be said where nothing, or less than half of what could be, is quantized; else nothing.

    What could be is all that no rule of the user leaves in float.
    """
    rows = [row for row in report.counted if not _left_by_user(row)]
    if not rows:
        return ""
    whole = sum(row.multiply_adds for row in rows)
    done = sum(row.done for row in rows)
    if not whole:
        is_done = any(row.state in ("quantized", "integers") for row in rows)
        return "" if is_done else "is in FLOAT: no operator is quantized"
    if done >= _MOSTLY_FLOAT * whole:
        return ""
    where = f"of the multiply-adds {_where_it_runs(report)}"
    return f"is {'mostly FLOAT' if done else 'in FLOAT'}: {percent(done / whole)} {where}"


def _left_by_user(row: Row) -> bool:
    return bool(row.rule) and any(why.rule == ReasonCode.QCONFIG_NONE for why in row.reasons)


def share_text(report: Facts) -> str:
    """How much of the multiplying is quantized; empty where nothing multiplies.

    >>> share_text(Facts("x86", not_counted="no example inputs"))
    'an unknown share of the multiply-adds (no example inputs)'
    """
    if report.not_counted:
        return f"an unknown share of the multiply-adds ({report.not_counted})"
    unknown = len(report.uncounted)
    if not report.multiply_adds and not unknown:
        return ""
    text = f"{percent(report.at_most)} of the multiply-adds {_where_it_runs(report)}"
    if not unknown:
        return text
    return f"at most {text} ({'one operator is' if unknown == 1 else f'{unknown} operators are'} not counted)"


def _where_it_runs(report: Facts) -> str:
    """On what the multiply-adds run, or are planned to."""
    done = [row for row in report.operators if row.done]
    others = any(word in row.dtype_config for row in done for word in _NOT_INTEGER)
    kind = "quantized" if others else "on integers"
    if report.lowered:
        return "on quantized kernels" if others else kind
    return f"planned to be {kind}"


def cards(report: Facts) -> Iterator[Card]:
    """What a reader asks first: accuracy, speed, size, work, what it runs on, what to do next."""
    figures = report.figures
    if figures.sqnr is not None:
        yield _accuracy(report, figures.sqnr)
    if figures.metric is not None:
        floating = "" if figures.float_metric is None else f"(float {figures.float_metric:.4g})"
        yield Card("metric", f"{figures.metric:.4g}", floating)
    if figures.seconds and figures.float_seconds:
        times = f"({1e3 * figures.seconds:.3g} ms, float {1e3 * figures.float_seconds:.3g} ms)"
        yield Card("speed", f"{figures.float_seconds / figures.seconds:.1f}× as fast", times)
    if report.float_bytes and report.quantized_bytes:
        ratio = report.float_bytes / report.quantized_bytes
        sizes = f"({human_bytes(report.float_bytes)} → {human_bytes(report.quantized_bytes)})"
        words = f"{ratio:.1f}× smaller" if ratio >= 1 else f"{1 / ratio:.1f}× larger"
        yield Card("size", words, sizes)
    if report.operators:
        counts = operator_counts(report)
        if report.multiply_adds:
            counts = f"multiply-adds per sample; {counts}"
            yield Card(
                "work", amount(report.multiply_adds / report.samples), counts, report.at_most
            )
        else:
            yield Card("work", "", counts)
    for extra in report.extras.get("cards", ()):
        yield Card(extra["title"], extra["value"], extra.get("remark", ""))
    if report.engine:
        yield Card("runs on", "", report.engine)
    if report.rows:
        yield Card("next", "", _next_step(report))


def _accuracy(report: Facts, sqnr: float) -> Card:
    figures = report.figures
    remark = f"at the outputs, {figures.data}"
    if figures.worst is not None and len(figures.outputs) > 1:
        remark += f"; lowest {figures.worst[1]:.1f} dB at {figures.worst[0]}"
    if math.isinf(sqnr):
        return Card("accuracy", "no error", remark)
    return Card("accuracy", f"SQNR {sqnr:.1f} dB", f"(higher is better) {remark}")


def operator_counts(report: Facts) -> str:
    """How many operators are quantized, run on integers anyway, and stay float."""
    states = Counter(row.state for row in report.counted)
    parts = [f"{states['quantized']} of {len(report.counted)} operators quantized"]
    if states["integers"]:
        parts.append(f"{states['integers']} more run on integers")
    if states["float"]:
        parts.append(f"{states['float']} stay{'s' * (states['float'] == 1)} float")
    return ", ".join(parts)


def _next_step(report: Facts) -> str:
    """The one thing to do now."""
    costly = by_cost(refusals(report.float_counted))
    share = costly[0].multiply_adds / (report.multiply_adds or 1) if costly else 0.0
    if report.library:
        return report.library
    lowest = report.figures.worst or ("", math.inf)
    if min(report.figures.sqnr or math.inf, lowest[1]) < LEAST_SQNR:
        return "backquant.compare(model, quantized, data): which operators cost the accuracy"
    if share > _SHOWN_FLOAT and advice(costly[0]):
        return "the fix of the largest part in float, below"
    if not report.lowered and report.float_bytes:
        return (
            "quantized.export(path), with dynamic_shapes= for batches of any size: this model is for export; "
            "run here, it simulates integers"
        )
    if not report.lowered:
        return "print(report.table()): all operators"
    return "quantized.save(path), quantized.export(path); print(quantized.report.table())"


def advice(group: Refusal) -> str:
    """What to do about operators that stay float: the fix of the reason, else what holds in general."""
    fixes = [reason.fix for reason in group.nearest if reason.fix]
    if fixes or not group.reasons:
        return fixes[0] if fixes else ""
    return remedy_of(group.reasons[0].rule)


def without_cost(groups: Iterable[Refusal]) -> str:
    """How many operators of each kind multiply nothing, the most frequent first.

    >>> without_cost([Refusal("add", "", ("a", "b"), ("a", "b"), ()), Refusal("mul", "", (), ("c",), ())])
    '2 add, 1 mul'
    """
    counts: Counter[str] = Counter()
    for group in groups:
        if not group.multiply_adds and not group.uncounted:
            counts[group.operator] += len(group.nodes)
    shown = [f"{count} {operator}" for operator, count in counts.most_common(_KINDS)]
    rest = sum(counts.values()) - sum(count for _, count in counts.most_common(_KINDS))
    return ", ".join([*shown, *([f"{rest} others"] if rest else [])])


_SHOWN = 6  # reasons by cost
_FEW = 8  # entries that no operator reached: text leaves more of them to the page
_STATES = {
    "quantized": "quantized",
    "integers": "float, run on integers",
    "float": "float",
}
_WORDS = {"integers": "float*", "float": "float", "not_tensor": "–"}


def document_of(report: Facts) -> Document:
    """The document of a report."""
    groups = refusals(report.float_counted)
    kernels = [f"{count} × {kernel}" for kernel, count in report.kernel_counts.items()]
    return Document(
        title=report.model or report.backend,
        about=f"on {report.backend}, {report.engine or 'reference model'}",
        headline=headline(report),
        tone="bad" if shortfall(report) else "",
        cards=tuple(cards(report)),
        parts=(
            Section(
                "What stays float, by share of the multiply-adds", tuple(_by_cost(report, groups))
            ),
            Section("The graph", [_graph(report)], in_text=False),
            Items("kernels", kernels),
            Section("Notes and unused rules", _notes(report)),
            Section(
                "What stays float, and why", [_refused(report, said) for said in paragraphs(groups)]
            ),
            Section("Quantized, and without an integer kernel", list(_without_kernel(report))),
            Section(
                f"All operators ({len(report.operators)})",
                operators_of(report),
                in_text=False,
                folded=True,
            ),
        ),
    )


def _by_cost(report: Facts, groups: list[Refusal]) -> Iterator[Part]:
    """What stays float and multiplies, the most expensive first, and what to do about the largest."""
    costly = by_cost(groups)
    total = report.multiply_adds or 1
    rows = []
    for group in costly[:_SHOWN]:
        rule = group.reasons[0].rule if group.reasons else "no reason given"
        share = "?" if group.uncounted else percent(group.multiply_adds / total)
        first = Cell(share, share=group.multiply_adds / total)
        name = Cell(group.label, node=group.nodes[0])
        rows.append(Line((first, name, f"{group.operator}: {rule}"), state="float"))
    if rest := sum(group.multiply_adds for group in costly[_SHOWN:]):
        rows.append(Line((percent(rest / total), f"{len(costly) - _SHOWN} more reasons", "")))
    if rows:
        yield Table([Column("share", "number"), Column("operators"), Column("why")], rows)
        yield Terms("about the largest", list(_largest(costly[0])), node=costly[0].nodes[0])
    if free := without_cost(groups):
        yield Note(f"in float, without multiply-adds: {free}")


def _largest(group: Refusal) -> Iterator[Term]:
    for reason in group.nearest[:1]:
        if reason.admitted:
            yield Term("supported", reason.admitted, reason.place)
    if todo := advice(group):
        yield Term("fix", todo)


def _terms(reason: ReasonRow, rule: str = "", admitted: str = "") -> Iterator[Term]:
    yield Term("rule", reason.rule, f"QConfigMapping: {rule}" if rule else "")
    if reason.asked:
        yield Term("requested", reason.asked)
    if reason.admitted:
        yield Term("supported", reason.admitted, reason.place)
    elif reason.place:
        yield Term("where", reason.place)
    if admitted:
        yield Term("supported", admitted)
    if reason.fix:
        yield Term("fix", reason.fix)


def _refused(report: Facts, paragraph: Paragraph) -> Terms:
    several = len(paragraph.refusals) > 1
    verb = "stays" if paragraph.count == 1 else "stay"
    none = f"{report.backend} has no entry for any of:" if paragraph.has_no_entry else ""
    return Terms(
        f"{paragraph.title}  {verb} float",
        [term for why in paragraph.reasons for term in _terms(why, paragraph.rule, none)],
        [
            (head, [(one.operator, one.label, one.nodes[0]) for one in part.refusals if several])
            for part in paragraph.parts
            if (head := paragraph.differing(part)) or several
        ],
        node="" if several else paragraph.refusals[0].nodes[0],
    )


def _without_kernel(report: Facts) -> Iterator[Part]:
    shown = {row.node for row in report.float_rows}
    for reason in report.unlowered:
        if reason.node not in shown:
            title = f"{reason.node or 'an operator'}  is quantized, and has no integer kernel"
            yield Terms(title, list(_terms(reason)), node=reason.node)


def _notes(report: Facts) -> list[Part]:
    """What did nothing, and what is to be said."""
    once = (
        f"{report.computed_once:,} multiply-adds of the model are not in its graph: they do not depend "
        "on the inputs and are computed once"
    )
    notes = [*report.notes, *([once] if report.computed_once else [])]
    entries = [f'entry "{entry}": no operator reaches it' for entry in report.unreached_entries]
    return [
        Listing("Rules of the QConfigMapping that no operator used", report.unused_rules, "unused"),
        Listing("Entries of the backend that this model does not reach", entries, most=_FEW),
        Listing("Notes", notes, "note"),
    ]


def operators_of(report: Facts) -> list[Part]:
    """All operators: dtypes by letter, measured output, rule, kernel, multiply-adds of a sample."""
    rows, letters = report.operators, dtype_letters(report)
    heads = ["node", "operator", "as", "rule", "output qparams", "kernel"]
    columns = [*map(Column, heads), Column("mult-adds", "number")]
    most = max((row.multiply_adds for row in rows), default=0) or 1
    named = rules_differ(report)
    lines = [_line(row, report.samples, letters, most, row.rule if named else "") for row in rows]
    legend = Listing("Dtypes", [f"{letter}  {text}" for text, letter in letters.items()])
    return [legend, Table(columns, lines), *map(Note, _marks(report))]


def _line(row: Row, samples: int, letters: dict[str, str], most: int, rule: str) -> Line:
    as_what = letters.get(row.dtype_config, "?") if row.quantized else _WORDS[row.state]
    counted = f"{row.multiply_adds // samples:,}" if row.multiply_adds else ""
    cost = f"{counted} + ?".removeprefix(" + ") if row.uncounted else counted
    cells = (
        row.node,
        _operator(row),
        Cell(as_what, kind=row.state, tip=row.dtype_config),
        rule,
        "" if row.output is None else row.output.short,
        row.kernel,
        Cell(cost, share=row.multiply_adds / most if row.multiply_adds else None),
    )
    return Line(cells, row.node, row.state)


def _operator(row: Row) -> str:
    """The operator, and what else the pattern that matched consists of."""
    parts = row.entry.split(", ")
    if row.operator not in parts:
        return f"{row.operator} in {row.entry}" if row.entry else row.operator
    parts.remove(row.operator)
    return " with ".join([row.operator, *([", ".join(parts)] if parts else [])])


def _marks(report: Facts) -> Iterator[str]:
    if report.on_integers:
        yield "* float in the plan, run by an integer kernel"
    if any(row.output is not None and row.output.shared_with for row in report.rows):
        yield "= x +n: shares scale and zero point with x and n others"


def dtype_letters(report: Facts) -> dict[str, str]:
    """A letter for each dtype config that was chosen, in order of first use.

    >>> dtype_letters(Facts("x86", rows=(Row("a", "add", "", "quantized", dtype_config="int8"),)))
    {'int8': 'A'}
    """
    return letters_of(row.dtype_config for row in report.quantized if row.dtype_config)


def rules_differ(report: Facts) -> bool:
    """Whether anything was asked of modules by name, beyond rules for all or for types.

    Those for one operator of a module (its n-th addition) are what a backend leaves in float by default.

    >>> [
    ...     rules_differ(Facts("x86", rows=(Row("a", "add", "", "quantized", rule=rule),)))
    ...     for rule in ("global", "module_name 'a'")
    ... ]
    [False, True]
    """
    return any(row.rule.startswith(("module_name ", "module_name_regex ")) for row in report.rows)


def _graph(report: Facts) -> Graph:
    rows, states = report.operators, Counter(row.state for row in report.counted)
    return Graph(
        [_box(row, report.samples) for row in rows],
        _drawn_inputs(report),
        _first(report),
        {state: f"{states[state]} {words}" for state, words in _STATES.items() if states[state]},
    )


def _drawn_inputs(report: Facts) -> dict[str, list[str]]:
    """The operators that each operator reads, looking through items of tuples and sizes."""
    known: dict[str, list[str]] = {}
    for row in report.rows:
        sources = (known.get(name, [name]) for name in row.inputs)
        found = list(dict.fromkeys(name for names in sources for name in names))
        known[row.node] = found if row.outcome == "not_tensor" else [row.node]
    return {
        row.node: list(
            dict.fromkeys(name for source in row.inputs for name in known.get(source, [source]))
        )
        for row in report.operators
    }


def _first(report: Facts) -> str | None:
    """The operator to show first: one that stays float, else the one with most multiply-adds."""
    rows = sorted(report.float_rows or report.operators, key=lambda row: -row.multiply_adds)
    return rows[0].node if rows else None


def _box(row: Row, samples: int) -> Box:
    """The operator; a click shows all of it, and whose outputs have the same qparams by construction."""
    kin = row.output.shared_with if row.output is not None else ()
    details = tuple(_details(row, samples))
    return Box(row.node, row.operator, row.name, row.state, details=details, kin=kin)


def _details(row: Row, samples: int) -> Iterator[tuple[str, str]]:
    cost = f"{row.multiply_adds // samples:,} per sample" if row.multiply_adds else ""
    if row.uncounted:
        cost = f"{cost} not counted: {', '.join(row.uncounted)}".lstrip()
    yield "operator", row.operator
    yield "outcome", _STATES[row.state]
    yield "module", row.module_path
    yield "fused from", ", ".join(row.fused)
    yield "kernel", row.kernel
    yield "multiply-adds", cost
    yield "entry", row.entry
    yield "dtypes", row.dtype_config
    yield "rule", f"QConfigMapping: {row.rule}" if row.rule else ""
    yield "requested", row.asked.replace("; ", "\n")
    yield from map(_measured, row.observers)
    for reason in row.reasons:
        yield "why float", reason.rule
        yield "requested", reason.asked
        yield "supported", f"{reason.admitted}\n{reason.place}".strip()
        yield "fix", reason.fix


def _measured(observer: ObserverRow) -> tuple[str, str]:
    name = "" if observer.role in ("output", "weight") else f"{observer.value}: "
    shared = f"\nshared with {', '.join(observer.shared_with)}" if observer.shared_with else ""
    return observer.role, f"{name}{observer.qparams or 'observed'}{shared}"
