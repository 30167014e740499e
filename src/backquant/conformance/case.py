"""What is claimed, how it is tried, and what came of it: plain data."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from backquant.backend_config import DTypeConfig
from backquant.backend_config.describe import describe_dtype


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
        known = {**data, "side": Side(data["side"]), "verdict": Verdict(data["verdict"])}
        return cls(**known)


def trial_data(trial: Trial) -> dict[str, Any]:
    """``trial`` as JSON-able data."""
    return {**asdict(trial), "side": trial.side.value}


def trial_from(data: Mapping[str, Any]) -> Trial:
    """Inverse of ``trial_data``.

    >>> trial = Trial(Claim(0, 1, "torch.add", "int8"), 3)
    >>> trial_from(trial_data(trial)) == trial
    True
    """
    values = {**data, "claim": Claim(**data["claim"]), "side": Side(data["side"])}
    return Trial(**values)
