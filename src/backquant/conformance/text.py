"""The results of a run in words."""

from __future__ import annotations

from collections.abc import Iterator

from backquant.conformance.case import Verdict
from backquant.conformance.results import Conformance

_SHOWN = 20


def to_text(found: Conformance) -> str:
    """A summary, and the claims that failed.

    >>> print(to_text(Conformance("x86", "x86", {"torch": "2.13.0"})))
    x86 on x86: 0 of 0 cases conform
    torch 2.13.0
    """
    return "\n".join(_lines(found))


def _lines(found: Conformance) -> Iterator[str]:
    counts = found.counts
    conforming = counts[Verdict.CONFORMS]
    yield f"{found.backend} on {found.engine}: {conforming:,} of {found.cases:,} cases conform"
    yield ", ".join(f"{name} {version}" for name, version in found.versions.items())
    if found.conforms and not found.computed and found.tallies:
        yield "  nothing was computed: refusals were tried; what is supported has no engine here"
    others = [v for v in Verdict if v is not Verdict.CONFORMS and counts[v]]
    for verdict in others:
        yield f"  {counts[verdict]:6,} {verdict.value}"
    exact = sum(tally.elements for tally in found.tallies.values() if tally.exact)
    if exact:
        yield (
            f"  {found.bit_equal:.3%} of {exact:,} integers equal the integer reference's; "
            f"the worst is {found.worst:g} step{'' if found.worst == 1 else 's'} off"
        )
    if not found.complete:
        yield "  the time was up before all cases were run; resume goes on"
    yield from _claims(found)


def _claims(found: Conformance) -> Iterator[str]:
    shown = [
        tally
        for tally in found.tallies.values()
        if tally.verdict not in (Verdict.CONFORMS, Verdict.UNTRIED)
    ]
    if shown:
        yield ""
    for tally in shown[:_SHOWN]:
        bad = sum(n for v, n in tally.verdicts.items() if v is not Verdict.CONFORMS)
        total = sum(tally.verdicts.values())
        yield f"{tally.pattern}   {tally.dtypes}"
        yield f"  {tally.verdict.value}: {bad} of {total} cases   {tally.kernel}".rstrip()
        yield f"  {tally.why}"
    if len(shown) > _SHOWN:
        yield f"… and {len(shown) - _SHOWN} more claims"
    untried = {t.pattern: t.why for t in found.tallies.values() if t.verdict is Verdict.UNTRIED}
    if untried:
        yield "\nnot tried:"
    yield from (f"  {pattern}: {why}" for pattern, why in untried.items())
