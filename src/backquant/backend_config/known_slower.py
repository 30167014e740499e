"""What is slower on integers than in float on a backend, as it was measured there once, as data.

For backends whose kernels run elsewhere and cannot be timed here. ``backquant.speed`` leaves in float what
such a record names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from backquant.backend_config.conditions import Condition, condition_from
from backquant.backend_config.declared import Record
from backquant.backend_config.kinds import OperatorNames, Where
from backquant.errors import SpecError


@dataclass(frozen=True, repr=False)
class KnownSlower(Record):
    """``operators``, by the names of their records, are slower on integers where ``where`` holds.

    ``measured`` is one case, in words; ``integer_us`` and ``float_us`` are its times in microseconds, the
    first with what it takes to quantize and dequantize. ``where`` is a condition or its mapping, as of a
    ``DTypeConfig``. Raises ``SpecError`` for a record without operators, condition or case, and where
    integers are not the slower ones.

    >>> small = {"hidden_size": {"max": 63}}
    >>> KnownSlower(("lstm",), small, "32 values, 20 steps", 20.0, 18.0).operators
    ('lstm',)
    """

    operators: Annotated[tuple[str, ...], OperatorNames(), "By the names of their records."]
    where: Annotated[Condition | Mapping[str, Any], Where(), "The sizes for which it holds."]
    measured: Annotated[str, "The case that was measured, in words."]
    integer_us: Annotated[float, "Its time on integers in microseconds."]
    float_us: Annotated[float, "Its time in float."]

    def _check(self) -> None:
        if self.where is None:
            raise SpecError(
                "a record says for which sizes it holds",
                where="where",
                fix="leave the operator out of the backend's entries if it is always slower",
            )
        for name, time in (("integer_us", self.integer_us), ("float_us", self.float_us)):
            if not time > 0:
                raise SpecError(f"a time is more than 0, got {time!r}", where=name)
        if self.integer_us <= self.float_us:
            raise SpecError(
                f"integers are not slower: {self.integer_us} µs, float {self.float_us} µs",
                where="integer_us",
            )

    @property
    def condition(self) -> Condition:
        """``where`` as a condition.

        >>> print(KnownSlower(("lstm",), {"hidden_size": {"max": 63}}, "a case", 2.0, 1.0).condition)
        hidden_size ≤ 63
        """
        condition = condition_from(self.where)
        assert condition is not None  # checked when the record was made
        return condition
