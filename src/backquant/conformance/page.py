"""Pages of a run: a matrix of entries and dtypes, as Markdown (``page_html`` has HTML)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from backquant.conformance.case import FAILURES, Verdict
from backquant.conformance.results import Conformance, Tally

MARKS = {
    Verdict.CONFORMS: "✔",
    Verdict.TOO_NARROW: "✔ (too narrow)",
    Verdict.WRONG: "✘ wrong",
    Verdict.REFUSED_BY_ENGINE: "✘ refused by engine",
    Verdict.NOT_INTEGER: "✘ not integer",
    Verdict.UNPREDICTABLE: "✘ unpredictable",
    Verdict.UNTRIED: "– not tried",
}
#: What a page says of claims, in its order: those that fail, limits that the engine does not have, the rest.
_KINDS = (
    ("What fails", tuple(FAILURES)),
    ("What is refused, and the engine computes rightly", (Verdict.TOO_NARROW,)),
    ("Not tried", (Verdict.UNTRIED,)),
)
HOW_TO_READ = (
    "✔ exact: all of the integers are the reference's; ✔ ≤ n: off by at most n steps, which the description "
    "states (results in float: 255ths of their range); too narrow: what the description refuses, the engine "
    "computes rightly."
)


@dataclass(frozen=True)
class Row:
    """One entry: its pattern, and a cell for each column."""

    pattern: str
    cells: tuple[Tally | None, ...]

    @property
    def kernel(self) -> str:
        """The kernel of the first cell that has one."""
        return next((cell.kernel for cell in self.cells if cell is not None and cell.kernel), "")


@dataclass(frozen=True)
class Block:
    """The entries that claim the same dtype configs: these, and a row for each entry."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """How many entries, and what they claim, or how many dtype configs that are."""
        number = f"{len(self.rows)} {'entry' if len(self.rows) == 1 else 'entries'}"
        one = len(self.columns) == 1
        return f"{number}: {self.columns[0] if one else f'{len(self.columns)} dtype configs'}"


@dataclass(frozen=True)
class Reason:
    """The entries that have the same verdict for the same reason."""

    verdict: Verdict
    dtypes: str
    why: str
    patterns: tuple[str, ...]


def table(found: Conformance) -> tuple[list[str], list[Row]]:
    """The columns (a dtype config each, in the order in which they first come) and a row for each entry."""
    columns = list(dict.fromkeys(tally.dtypes for tally in found.tallies.values()))
    patterns = list(dict.fromkeys(tally.pattern for tally in found.tallies.values()))
    rows = [
        Row(pattern, tuple(found.tallies.get((pattern, dtypes)) for dtypes in columns))
        for pattern in patterns
    ]
    return columns, rows


def blocks(found: Conformance) -> list[Block]:
    """The matrix divided into blocks of entries that claim the same dtype configs, so that no block has empty
    cells.

    >>> claims = [("add", "int8"), ("mul", "int8"), ("relu", "uint8")]
    >>> found = Conformance("x86", "x86", {}, tallies={claim: Tally(*claim) for claim in claims})
    >>> [block.title for block in blocks(found)]
    ['2 entries: int8', '1 entry: uint8']
    """
    columns, rows = table(found)
    groups: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        claimed = tuple(at for at, cell in enumerate(row.cells) if cell is not None)
        groups.setdefault(claimed, []).append(
            Row(row.pattern, tuple(row.cells[at] for at in claimed))
        )
    return [
        Block(tuple(columns[at] for at in claimed), tuple(group))
        for claimed, group in groups.items()
    ]


def headline(found: Conformance) -> str:
    """The result of a run in a few words.

    >>> headline(Conformance("my_npu", "none", {}))
    'nothing was computed'
    """
    if not found.conforms:
        return "does not conform"
    return "conforms" if found.computed else "nothing was computed"


def reasons(found: Conformance) -> Iterator[tuple[str, list[Reason]]]:
    """For each heading, the entries below it; those with the same reason are listed together.

    >>> from collections import Counter
    >>> wrong = {"verdicts": Counter([Verdict.WRONG]), "reasons": {Verdict.WRONG: "off by 2 steps"}}
    >>> tallies = {(name, "int8"): Tally(name, "int8", **wrong) for name in ("add", "mul")}
    >>> [(_, [reason])] = reasons(Conformance("x86", "x86", {}, tallies=tallies))
    >>> reason.why, reason.patterns
    ('off by 2 steps', ('add', 'mul'))
    """
    for title, verdicts in _KINDS:
        groups: dict[tuple[Verdict, str, str], list[str]] = {}
        for tally in found.tallies.values():
            if tally.verdict in verdicts:
                key = (tally.verdict, tally.dtypes, tally.why)
                groups.setdefault(key, []).append(short(tally.pattern))
        if groups:
            yield title, [Reason(*key, tuple(patterns)) for key, patterns in groups.items()]


def short(pattern: str) -> str:
    """The pattern without the names of packages: ``nn.ReLU(nn.Conv2d)``."""
    return re.sub(r"\b(torch|backquant)\.(?=nn\b)", "", pattern).replace("nn.functional.", "F.")


def cell_text(tally: Tally | None) -> str:
    """The text of a cell, such as ``✔ ≤ 1``; empty where nothing is claimed."""
    if tally is None:
        return ""
    text = MARKS[tally.verdict]
    if tally.verdict in (Verdict.CONFORMS, Verdict.TOO_NARROW) and tally.elements:
        off = " exact" if not tally.different else f" ≤ {tally.worst:.2g}"
        text = text.replace("✔", f"✔{off}")
    if tally.verdict is Verdict.UNTRIED and tally.verdicts[Verdict.CONFORMS]:
        text = f"– not run; {tally.verdicts[Verdict.CONFORMS]} refusals hold"
    return text


def to_markdown(found: Conformance) -> str:
    """The page as Markdown.

    >>> print(to_markdown(Conformance("x86", "x86", {"torch": "2.13.0"})).splitlines()[0])
    # x86 on x86: nothing was computed
    """
    return "\n".join(_markdown(found)) + "\n"


def _markdown(found: Conformance) -> Iterator[str]:
    counts = found.counts
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    yield f"# {found.backend} on {found.engine}: {headline(found)}"
    yield ""
    part = "" if found.complete else "; the time was up before all cases were run"
    yield f"{versions}; {found.date}, seed {found.seed}{part}."
    yield ""
    yield "| outcome | cases |"
    yield "| --- | --- |"
    for verdict in Verdict:
        if counts[verdict]:
            yield f"| {verdict.value} | {counts[verdict]:,} |"
    yield ""
    if found.computed:
        worst = f"{found.worst:g} step{'' if found.worst == 1 else 's'}"
        yield (
            f"{found.bit_equal:.3%} of the integers equal the integer reference's; the worst is {worst} "
            f"off. {HOW_TO_READ}"
        )
    for title, group in reasons(found):
        yield from ("", f"## {title}", "")
        for each in group:
            names = ", ".join(f"`{pattern}`" for pattern in each.patterns)
            yield f"- {each.verdict.value}: {each.why} ({each.dtypes}): {names}"
    for block in blocks(found):
        yield from _block(block)


def _block(block: Block) -> Iterator[str]:
    """A table of entries; a single column is named in the title, several in a list below the table."""
    yield from ("", f"## {block.title}", "")
    heads = [f"({at})" for at in range(1, len(block.columns) + 1)]
    heads = ["result"] if len(heads) == 1 else heads
    yield f"| {' | '.join(['entry', *heads, 'kernel'])} |"
    yield "| --- " * (len(heads) + 2) + "|"
    for row in block.rows:
        cells = [cell_text(cell) for cell in row.cells]
        shown = row.kernel.replace("|", "\\|")
        yield f"| {' | '.join([f'`{short(row.pattern)}`', *cells, shown])} |"
    if len(block.columns) > 1:
        yield ""
        yield from (f"({at}) {dtypes}  " for at, dtypes in enumerate(block.columns, 1))
