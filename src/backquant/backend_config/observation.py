"""How the inputs and outputs of a pattern are observed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from backquant.backend_config.declared import Record
from backquant.backend_config.kinds import Number
from backquant.errors import SpecError


class ObservationType(Enum):
    """How the inputs and outputs of a pattern are observed, and later quantized.

    Values are those of ``torch.ao.quantization.backend_config.ObservationType`` (PyTorch 2.x).

    >>> ObservationType(2)
    ObservationType.INPUT_OUTPUT_NOT_OBSERVED
    """

    #: Input and output have observers of their own: convolution, linear, softmax.
    OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT = 0

    #: The output is observed by the observer of the input: cat, max pooling, reshape.
    OUTPUT_SHARE_OBSERVER_WITH_INPUT = 1

    #: Neither input nor output is observed: ``x.shape``, ``x.size()``.
    INPUT_OUTPUT_NOT_OBSERVED = 2

    def __repr__(self) -> str:
        return f"ObservationType.{self.name}"


def check_observation_type(value: Any, field: str) -> None:
    """Raise ``SpecError`` unless ``value`` is an ``ObservationType`` of this package."""
    if isinstance(value, ObservationType):
        return
    name = value if isinstance(value, str) else getattr(value, "name", "")
    fix = f"ObservationType.{name}" if name in ObservationType.__members__ else ""
    raise SpecError(
        f"{field} must be an ObservationType, got {value!r}",
        where=field,
        fix=f"from backquant.backend_config import ObservationType\n{fix}".rstrip(),
    )


# How far an engine's results may be from the integer reference, and why.


@dataclass(frozen=True, repr=False)
class Tolerance(Record):
    """By how many ``steps`` results may be off: integers, or 255ths of the range of float results.

    ``reason``: why they are off (the kernel rounds twice, its table holds floats). Operators that only move
    values have no tolerance. Raises ``SpecError`` for less than 0 steps, and without a reason.

    >>> print(Tolerance(1, "requantized in float32"))
    1 step: requantized in float32
    """

    steps: Annotated[
        int | float,
        Number(least=0),
        "Of integers; of results in float: of the 255 parts of their range.",
    ]
    reason: Annotated[str, "What the engine computes otherwise."]

    def __str__(self) -> str:
        return f"{self.steps:g} step{'' if self.steps == 1 else 's'}: {self.reason}"
