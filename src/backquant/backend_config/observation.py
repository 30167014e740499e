"""How the inputs and outputs of a pattern are observed."""

from __future__ import annotations

from enum import Enum
from typing import Any

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
