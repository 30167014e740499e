"""What the outcomes of PyTorch's own tests say: counts, failures with their reasons, what is not judged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple, TypedDict

__all__ = ["Outcome", "Outcomes", "put_into", "read", "report"]

_REASONS = Path(__file__).with_name("reasons.txt")
_BEGIN, _END = (
    "<!-- own tests: written by tools/torch_own_tests.py -->",
    "<!-- end of own tests -->",
)


class Outcome(TypedDict):
    """Of one test: ``why`` is the last line of its error, ``trace`` where it came from."""

    test: str
    outcome: str
    why: str
    trace: str


class Outcomes(NamedTuple):
    """By test: ours, ``torch.ao``'s, and those that are not judged, with the reason."""

    ours: dict[str, Outcome]
    theirs: dict[str, Outcome]
    left_out: dict[str, str]

    def judged(self) -> list[Outcome]:
        """The outcomes that count: ``torch.ao`` passes, and nothing left out on purpose is named."""
        return [
            outcome
            for test, outcome in self.ours.items()
            if test not in self.left_out and self._theirs(test) == "passed"
        ]

    def failed(self) -> dict[str, str]:
        """The judged tests that fail, with the reason: of ``reasons.txt``, or the error itself."""
        known = _reasons()
        return {
            o["test"]: known.get(o["test"]) or _first_line(o["why"])
            for o in self.judged()
            if o["outcome"] != "passed"
        }

    def not_judged(self) -> dict[str, str]:
        """The others, with the reason."""
        judged = {outcome["test"] for outcome in self.judged()}
        return {
            test: self.left_out.get(test) or f"{self._theirs(test)} on torch.ao itself"
            for test in self.ours
            if test not in judged
        }

    def headline(self) -> str:
        """How many pass, of how many.

        >>> passed = Outcome(test="T.test_a", outcome="passed", why="", trace="")
        >>> failed = Outcome(test="T.test_a", outcome="failed", why="no scale", trace="")
        >>> Outcomes({"T.test_a": failed}, {"T.test_a": passed}, {}).headline()
        'by prefix alone: 0 of 1 pass (0.0 %)'
        """
        judged = len(self.judged())
        passed = judged - len(self.failed())
        return f"by prefix alone: {passed} of {judged} pass ({100 * passed / max(1, judged):.1f} %)"

    def _theirs(self, test: str) -> str:
        return self.theirs[test]["outcome"] if test in self.theirs else "not run"


def read(path: Path) -> dict[str, Outcome]:
    """The outcomes in a file of JSON lines, by test; empty where there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    outcomes: list[Outcome] = [json.loads(line) for line in lines]
    return {outcome["test"]: outcome for outcome in outcomes}


def report(outcomes: Outcomes) -> str:
    """The counts, each judged test that failed, and what is not judged, as text."""
    lines = [outcomes.headline()]
    for title, tests in (("failed", outcomes.failed()), ("not judged", outcomes.not_judged())):
        lines += [f"{title}: {len(tests)}"]
        lines += [f"  {test}: {why}" for test, why in sorted(tests.items())]
    return "\n".join(lines)


def put_into(page: Path, outcomes: Outcomes) -> None:
    """Write the counts and both lists between the marks of ``page``."""
    before, _, rest = page.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    judged, failed = len(outcomes.judged()), outcomes.failed()
    parts = [
        _BEGIN,
        f"**{judged - len(failed)} of {judged}** tests pass by prefix alone.",
        "",
        *_table("Tests that fail", failed),
        "",
        *_table("Tests that are not judged", outcomes.not_judged()),
        _END,
    ]
    page.write_text(before + "\n".join(parts) + after)


def _table(title: str, tests: dict[str, str]) -> list[str]:
    """A row for each reason, the most frequent first."""
    by_reason: dict[str, list[str]] = {}
    for test, why in sorted(tests.items()):
        by_reason.setdefault(why, []).append(f"`{test.rpartition('.')[2]}`")
    groups = sorted(by_reason.items(), key=lambda group: -len(group[1]))
    rows = [f"| {_cell(why)} | {', '.join(names)} |" for why, names in groups]
    return [f"| {title} ({len(tests)}): reason | tests |", "| --- | --- |", *rows]


def _cell(text: str) -> str:
    return re.sub(r"([|<>*`])", r"\\\1", text)


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")[:200]


def _reasons() -> dict[str, str]:
    lines = _REASONS.read_text().splitlines() if _REASONS.exists() else []
    pairs = (line.partition(": ") for line in lines if line and not line.startswith("#"))
    return {test: why for test, _, why in pairs}
