"""Which trials a run consists of: the claims of a description, round by round."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

from backquant.backend_config import BackendConfig
from backquant.conformance.case import Claim, Side, Trial, dtypes_text
from backquant.conformance.combinations import combinations
from backquant.errors import UsageError, did_you_mean


def claimed(backend: BackendConfig) -> BackendConfig:
    """``backend`` without its rules about where integers do not pay, so that all that it claims is tried."""
    if backend.qdq is None or not backend.qdq.leave_float:
        return backend
    return copy.copy(backend).set_qdq(replace(backend.qdq, leave_float=()))


def claims(backend: BackendConfig, entries: Sequence[str] = ()) -> list[Claim]:
    """What ``backend`` claims, entry by entry, then combinations of them; with ``entries`` those with one of
    these texts in it.

    Raises ``UsageError`` for a text that no pattern has.

    >>> from backquant.backend_config import get_backend_config
    >>> [str(claim) for claim in claims(get_backend_config("x86"), ["nn.ReLU(torch.add"])]
    ['torch.nn.ReLU(torch.add) | input quint8, output quint8']
    >>> claims(get_backend_config("x86"), ["cat of two"])[0].pattern
    'cat of two torch.nn.Conv1d'
    """
    found = [
        Claim(at, position, str(entry.normal_pattern), dtypes_text(config))
        for at, entry in enumerate(backend.configs)
        for position, config in enumerate(entry.dtype_configs)
    ]
    found += combinations(backend)
    patterns = {claim.pattern for claim in found}
    for text in entries:
        if not any(text in pattern for pattern in patterns):
            near = did_you_mean(text, patterns, f"backquant show {backend.name}")
            raise UsageError(f"no entry of {backend.name} has {text!r}", where="entries", fix=near)
    return [claim for claim in found if not entries or any(t in claim.pattern for t in entries)]


def trials(found: Sequence[Claim], rounds: int, seed: int) -> Iterator[Trial]:
    """Every claim with its recorded example, then what lies beyond it, then drawn uses, one after the other.

    >>> [(t.number, t.side.value) for t in trials([Claim(0, 0, "torch.add", "int8")], 2, 0)]
    [(0, 'accepted'), (0, 'refused'), (1, 'accepted')]
    """
    for number in range(rounds):
        yield from (Trial(claim, number, seed=seed) for claim in found)
        if number == 0:
            alone = (claim for claim in found if not claim.together)
            yield from (Trial(claim, 0, Side.REFUSED, seed=seed) for claim in alone)
