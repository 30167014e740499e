"""What a run found: counts for each claim, and the cases that do not conform."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from backquant.backend_config import BackendConfig, BackendPatternConfig, DTypeConfig
from backquant.backend_config.describe import describe_dtype
from backquant.files import write_text
from backquant.json_text import from_plain_data, plain_data
from backquant.pages import Card, Cell, Document, Listing, Note, Part, Section, Shown, Table

# What is claimed, how it is tried, and what came of it: plain data.


class Verdict(str, Enum):
    """The outcome of one case, in a word."""

    CONFORMS = "conforms"
    WRONG = "wrong"  # other numbers than the integer reference, by more steps than the entry states
    REFUSED_BY_ENGINE = (
        "refused by engine"  # the description admits it; the engine raises, hangs or dies
    )
    NOT_INTEGER = "not integer"  # the description admits it; the engine computes it in float
    TOO_NARROW = "too narrow"  # the description refuses it; the engine computes it, and rightly
    UNPREDICTABLE = "unpredictable by the description"  # the plan does another thing than it says
    UNTRIED = "untried"  # nothing says how the operator is called


#: Verdicts for which a claim does not hold.
FAILURES = (
    Verdict.WRONG,
    Verdict.REFUSED_BY_ENGINE,
    Verdict.NOT_INTEGER,
    Verdict.UNPREDICTABLE,
)


class Side(str, Enum):
    """Whether the description admits the case."""

    ACCEPTED = "accepted"
    REFUSED = "refused"


@dataclass(frozen=True)
class Claim:
    """One dtype config of one entry: ``entry`` and ``config`` are positions in the description.

    ``together``: the name of a combination of this entry with others (``combinations``).
    """

    entry: int
    config: int
    pattern: str
    dtypes: str
    together: str = ""

    def __str__(self) -> str:
        return f"{self.pattern} | {self.dtypes}"

    def of(self, backend: BackendConfig) -> tuple[BackendPatternConfig, DTypeConfig]:
        """The entry and the dtype config that it is about."""
        entry = backend.configs[self.entry]
        return entry, entry.dtype_configs[self.config]


def dtypes_text(config: DTypeConfig) -> str:
    """A dtype config in one line.

    >>> import torch
    >>> dtypes_text(DTypeConfig(torch.quint8, torch.float, torch.qint8, is_dynamic=True))
    'input quint8, output float32, weight qint8, dynamic'
    """
    words = [
        f"{role} {describe_dtype(demand)}"
        for role, demand in (
            ("input", config.input_dtype_with_constraints),
            ("output", config.output_dtype_with_constraints),
            ("weight", config.weight_dtype_with_constraints),
        )
        if demand.dtype is not None
    ]
    return ", ".join([*words, *(("dynamic",) if config.is_dynamic else ())])


@dataclass(frozen=True)
class Trial:
    """One model for a claim: use ``number`` of the operator (0: its recorded example), drawn with ``seed``.

    On the refused side it is one for each thing that may be asked beyond the claim.
    """

    claim: Claim
    number: int = 0
    side: Side = Side.ACCEPTED
    seed: int = 0

    @property
    def key(self) -> str:
        """A name of the case that is the same in every run.

        >>> Trial(Claim(0, 0, "torch.add", "int8")).key
        'torch.add | int8 #0'
        """
        return f"{self.claim} {'beyond' if self.side is Side.REFUSED else f'#{self.number}'}"

    def choice(self, about: str = "") -> random.Random:
        """Random numbers that depend on the claim, the number and the seed alone."""
        text = f"{self.claim}{about}"
        return random.Random(zlib.crc32(text.encode()) + 65_537 * self.number + 7919 * self.seed)

    def again(self, times: int, about: str = "") -> random.Random:
        """``choice`` of the next draw, where so many before it are not admitted."""
        return self.choice(f"{about} again {times}" if times else about)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case, with its figures.

    ``steps``: how far the worst result is off; ``limit``: how far it may be. ``elements``: how many results
    were compared; ``different``: how many of them were off at all. ``exact``: whether they were compared with
    the integer reference, not with the reference model in float.
    """

    case: str
    pattern: str
    dtypes: str
    side: Side
    engine: str
    verdict: Verdict
    use: str = ""
    kernel: str = ""
    steps: float = 0.0
    limit: float = 0.0
    elements: int = 0
    different: int = 0
    exact: bool = False
    detail: str = ""
    trial: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able data; ``from_dict`` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """Inverse of ``to_dict``.

        >>> made = Outcome("c", "torch.add", "int8", Side.ACCEPTED, "x86", Verdict.CONFORMS)
        >>> Outcome.from_dict(made.to_dict()) == made
        True
        """
        made: Outcome = from_plain_data(cls, data)
        return made


def trial_data(trial: Trial) -> dict[str, Any]:
    """``trial`` as JSON-able data."""
    data: dict[str, Any] = plain_data(trial)
    return data


def trial_from(data: Mapping[str, Any]) -> Trial:
    """Inverse of ``trial_data``.

    >>> trial = Trial(Claim(0, 1, "torch.add", "int8"), 3)
    >>> trial_from(trial_data(trial)) == trial
    True
    """
    made: Trial = from_plain_data(Trial, data)
    return made


_MARKS = {
    Verdict.CONFORMS: "✔",
    Verdict.TOO_NARROW: "✔ (too narrow)",
    Verdict.WRONG: "✘ wrong",
    Verdict.REFUSED_BY_ENGINE: "✘ refused by engine",
    Verdict.NOT_INTEGER: "✘ not integer",
    Verdict.UNPREDICTABLE: "✘ unpredictable",
    Verdict.UNTRIED: "– not tried",
}

#: What a page says of claims, in its order: those that fail, limits that the engine does not have, the rest.
REASONS = (
    ("What fails", tuple(FAILURES)),
    ("What is refused, and the engine computes rightly", (Verdict.TOO_NARROW,)),
    ("Not tried", (Verdict.UNTRIED,)),
)
_HOW_TO_READ = (
    "✔ exact: all of the integers are the reference's; ✔ ≤ n: off by at most n steps, which the description "
    "states (results in float: 255ths of their range); too narrow: what the description refuses, the engine "
    "computes rightly."
)
_FEW = 20  # reasons that text shows
_KEPT = 2_000  # outcomes that are kept whole; the counts know all of them


@dataclass
class Tally:
    """The cases of one claim: how many came to what, and how the integers compared."""

    pattern: str
    dtypes: str
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0
    limit: float = 0.0
    elements: int = 0
    different: int = 0
    exact: bool = False
    reasons: dict[Verdict, str] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Count one more case."""
        self.verdicts[outcome.verdict] += 1
        if outcome.kernel:
            self.kernels[outcome.kernel] += 1
        if outcome.elements:
            self.worst = max(self.worst, outcome.steps)
            self.limit = max(self.limit, outcome.limit)
            self.elements += outcome.elements
            self.different += outcome.different
            self.exact = outcome.exact
        if outcome.verdict is not Verdict.CONFORMS:
            off = f"{outcome.steps:g} steps off, {outcome.limit:g} are stated"
            self.reasons.setdefault(outcome.verdict, outcome.detail or off)

    @property
    def why(self) -> str:
        """The first reason for the most serious of them."""
        return self.reasons.get(self.verdict, "")

    @property
    def verdict(self) -> Verdict:
        """The most serious of them; where nothing was computed, that a refusal holds is not all that was
        claimed."""
        last = (Verdict.CONFORMS, Verdict.UNTRIED)
        order: tuple[Verdict, ...] = (*FAILURES, Verdict.TOO_NARROW)
        order += last if self.elements else last[::-1]
        return next(each for each in order if self.verdicts[each])

    @property
    def result(self) -> str:
        """The verdict as a cell of a table, such as ``✔ ≤ 1``."""
        text = _MARKS[self.verdict]
        if self.verdict in (Verdict.CONFORMS, Verdict.TOO_NARROW) and self.elements:
            off = " exact" if not self.different else f" ≤ {self.worst:.2g}"
            text = text.replace("✔", f"✔{off}")
        if self.verdict is Verdict.UNTRIED and self.verdicts[Verdict.CONFORMS]:
            text = f"– not run; {self.verdicts[Verdict.CONFORMS]} refusals hold"
        return text

    @property
    def tone(self) -> str:
        """The colour of the verdict."""
        if self.verdict in FAILURES:
            return "bad"
        return "none" if self.verdict is Verdict.UNTRIED else "good"

    @property
    def kernel(self) -> str:
        """The kernel that most cases ran on."""
        return next((name for name, _ in self.kernels.most_common(1)), "")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able data."""
        return {
            "pattern": self.pattern,
            "dtypes": self.dtypes,
            "verdict": self.verdict.value,
            "cases": {each.value: count for each, count in self.verdicts.items()},
            "kernel": self.kernel,
            "worst_steps": self.worst,
            "stated_steps": self.limit,
            "results": self.elements,
            "results_off": self.different,
            "integers": self.exact,
            "why": self.why,
        }


@dataclass
class Conformance(Shown):
    """Whether an engine does what a description says of it.

    ``tallies``: counts by claim, pattern and dtypes. ``outcomes``: the cases that do not conform.
    ``complete``: whether time sufficed for all cases. ``print`` shows a summary; ``save_html``,
    ``save_markdown`` and ``save_json`` write files.

    >>> found = Conformance("x86", "x86", {"torch": "2.13.0"})
    >>> found.conforms, found.cases
    (True, 0)
    """

    backend: str
    engine: str
    versions: dict[str, str]
    seed: int = 0
    date: str = ""
    seconds: float = 0.0
    complete: bool = True
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one more case."""
        key = (outcome.pattern, outcome.dtypes)
        if key not in self.tallies:
            self.tallies[key] = Tally(*key)
        self.tallies[key].add(outcome)
        if outcome.verdict is not Verdict.CONFORMS and len(self.outcomes) < _KEPT:
            self.outcomes.append(outcome)

    @property
    def counts(self) -> Counter[Verdict]:
        """How many cases had which outcome."""
        total: Counter[Verdict] = Counter()
        for tally in self.tallies.values():
            total.update(tally.verdicts)
        return total

    @property
    def cases(self) -> int:
        """How many cases were tried."""
        return sum(n for verdict, n in self.counts.items() if verdict is not Verdict.UNTRIED)

    @property
    def conforms(self) -> bool:
        """Whether no claim failed."""
        return not any(self.counts[verdict] for verdict in FAILURES)

    @property
    def computed(self) -> bool:
        """Whether an engine has computed any result."""
        return any(tally.elements for tally in self.tallies.values())

    @property
    def failures(self) -> list[Outcome]:
        """The kept cases in which a claim failed."""
        return [each for each in self.outcomes if each.verdict in FAILURES]

    @property
    def bit_equal(self) -> float:
        """The share of integers that equal the integer reference's; 1 where none were compared."""
        exact = [tally for tally in self.tallies.values() if tally.exact]
        elements = sum(tally.elements for tally in exact)
        return 1 - sum(tally.different for tally in exact) / elements if elements else 1.0

    @property
    def worst(self) -> float:
        """How many steps the worst integer is off."""
        return max((tally.worst for tally in self.tallies.values() if tally.exact), default=0.0)

    def findings(self) -> Iterator[Outcome]:
        """For each claim and each kind of failure the first case: those that get a script to reproduce
        them.
        """
        seen = set()
        for outcome in self.outcomes:
            key = (outcome.pattern, outcome.dtypes, outcome.verdict)
            if outcome.verdict is not Verdict.UNTRIED and key not in seen:
                seen.add(key)
                yield outcome

    def to_dict(self) -> dict[str, Any]:
        """JSON-able data: what the JSON file holds."""
        return {
            "backend": self.backend,
            "engine": self.engine,
            "versions": self.versions,
            "seed": self.seed,
            "date": self.date,
            "seconds": round(self.seconds, 1),
            "complete": self.complete,
            "conforms": self.conforms,
            "cases": self.cases,
            "counts": {each.value: count for each, count in self.counts.items()},
            "bit_equal": self.bit_equal,
            "worst_steps": self.worst,
            "claims": [tally.to_dict() for tally in self.tallies.values()],
            "outcomes": [each.to_dict() for each in self.outcomes],
        }

    def document(self) -> Document:
        """The counts, what fails for which reason, and a matrix of entries and dtypes."""
        title = f"{self.backend} on {self.engine}"
        conforming = f"{self.counts[Verdict.CONFORMS]:,} of {self.cases:,} cases conform"
        return Document(
            title=title,
            about=self.verdict,
            headline=f"{title}: {self.verdict}; {conforming}",
            tone="good" if self.conforms and self.computed else "" if self.conforms else "bad",
            cards=list(self._cards()),
            parts=[*self._reasons(), *self._blocks()],
        )

    @property
    def verdict(self) -> str:
        """The result in a few words.

        >>> Conformance("my_npu", "none", {}).verdict
        'nothing was computed'
        """
        if not self.conforms:
            return "does not conform"
        return "conforms" if self.computed else "nothing was computed"

    def _cards(self) -> Iterator[Card]:
        yield from (Card(v.value, f"{n:,}", "cases") for v, n in self.counts.most_common())
        exact = sum(tally.elements for tally in self.tallies.values() if tally.exact)
        if exact:
            yield Card("of the integers equal", f"{self.bit_equal:.3%}", f"of {exact:,}")
            yield Card("worst", f"{self.worst:g} step{'' if self.worst == 1 else 's'}", "off")
        if self.conforms and not self.computed and self.tallies:
            words = "refusals were tried; what is supported has no engine here"
            yield Card("nothing was computed", "", words)
        if not self.complete:
            yield Card(
                "not complete", "", "the time was up before all cases were run; resume goes on"
            )
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        yield Card("versions", "", f"{versions}; {self.date}, seed {self.seed}")

    def _reasons(self) -> Iterator[Part]:
        """For each heading, the claims below it; those with the same reason are one row."""
        for title, verdicts in REASONS:
            groups: dict[tuple[str, str, str], list[str]] = {}
            for tally in self.tallies.values():
                if tally.verdict in verdicts:
                    key = (tally.verdict.value, tally.why, tally.dtypes)
                    groups.setdefault(key, []).append(short(tally.pattern))
            rows = [(*key, ", ".join(patterns)) for key, patterns in groups.items()]
            yield Section(title, [Table.of("verdict, why, dtypes, `entries", rows, few=_FEW)])

    def _blocks(self) -> Iterator[Part]:
        """Entries and dtypes: a table for all entries that claim the same dtype configs."""
        blocks: dict[tuple[str, ...], list[list[Tally]]] = {}
        for tallies in self.claims().values():
            blocks.setdefault(tuple(tally.dtypes for tally in tallies), []).append(tallies)
        if self.computed:
            yield Section("Entries", [Note(_HOW_TO_READ)], in_text=False)
        for dtypes, rows in blocks.items():
            number = f"{len(rows)} {'entry' if len(rows) == 1 else 'entries'}"
            names = [f"({at})" for at in range(1, len(dtypes) + 1)]
            one = len(dtypes) == 1
            heads = ", ".join(["`entry", *(["result"] if one else names), "kernel"])
            legend = [] if one else list(map(" ".join, zip(names, dtypes, strict=True)))
            yield Section(
                f"{number}: {dtypes[0] if one else f'{len(dtypes)} dtype configs'}",
                [Listing("", legend), Table.of(heads, [_cells(row) for row in rows])],
                in_text=False,
            )

    def claims(self) -> dict[str, list[Tally]]:
        """The claims of each pattern; their dtypes are in one order for all.

        >>> claims = [("add", "int8"), ("mul", "int8"), ("add", "uint8")]
        >>> list(Conformance("x", "x", {}, tallies={c: Tally(*c) for c in claims}).claims())
        ['add', 'mul']
        """
        found: dict[str, list[Tally]] = {tally.pattern: [] for tally in self.tallies.values()}
        order = {tally.dtypes: at for at, tally in reversed([*enumerate(self.tallies.values())])}
        for tally in sorted(self.tallies.values(), key=lambda one: order[one.dtypes]):
            found[tally.pattern].append(tally)
        return found

    def save_json(self, path: str | Path) -> None:
        """Write everything as data."""
        write_text(path, json.dumps(self.to_dict(), indent=1, allow_nan=False), "save_json(path)")


def short(pattern: str) -> str:
    """The pattern without the names of packages: ``nn.ReLU(nn.Conv2d)``."""
    return re.sub(r"\b(torch|backquant)\.(?=nn\b)", "", pattern).replace("nn.functional.", "F.")


def _cells(tallies: list[Tally]) -> list[str | Cell]:
    kernel = next((tally.kernel for tally in tallies if tally.kernel), "")
    results = [Cell(tally.result, tally.tone, tally.why) for tally in tallies]
    return [short(tallies[0].pattern), *results, kernel]
