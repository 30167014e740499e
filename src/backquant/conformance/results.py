"""What a run found: counts for each claim, and the cases that do not conform."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backquant.conformance.case import FAILURES, Outcome, Verdict
from backquant.files import write_text

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
class Conformance:
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

    def __str__(self) -> str:
        from backquant.conformance.text import to_text

        return to_text(self)

    def save_html(self, path: str | Path) -> None:
        """Write the page that a person reads; ``UsageError`` where it cannot be."""
        from backquant.conformance.page_html import to_html

        write_text(path, to_html(self), "save_html(path)")

    def save_markdown(self, path: str | Path) -> None:
        """Write the same as Markdown."""
        from backquant.conformance.page import to_markdown

        write_text(path, to_markdown(self), "save_markdown(path)")

    def save_json(self, path: str | Path) -> None:
        """Write everything as data."""
        import json

        write_text(path, json.dumps(self.to_dict(), indent=1, allow_nan=False), "save_json(path)")
