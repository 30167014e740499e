"""What is slower on integers than in float on a backend, as it was measured there once, as data.

For backends whose kernels run elsewhere and cannot be timed here. ``backquant.speed`` leaves in float what
such a record names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from backquant.backend_config.checks import check_keys, check_number, within
from backquant.backend_config.conditions import Condition, condition_data, condition_from
from backquant.errors import SpecError

_TIMES = ("integer_us", "float_us")


@dataclass(frozen=True)
class KnownSlower:
    """``operators``, by the names of their records, are slower on integers where ``where`` holds.

    ``measured`` is one case, in words; ``integer_us`` and ``float_us`` are its times in microseconds, the
    first with what it takes to quantize and dequantize. ``where`` is a condition or its mapping, as of a
    ``DTypeConfig``. Raises ``SpecError`` for a record without operators, condition or case, and where
    integers are not the slower ones.

    >>> small = {"hidden_size": {"max": 63}}
    >>> KnownSlower(("lstm",), small, "32 values, 20 steps", 20.0, 18.0).operators
    ('lstm',)
    """

    operators: tuple[str, ...]
    where: Condition | Mapping[str, Any]
    measured: str
    integer_us: float
    float_us: float

    def __post_init__(self) -> None:
        given: Any = self.operators
        is_list = isinstance(given, (tuple, list)) and bool(given)
        if not is_list or not all(isinstance(name, str) and name for name in given):
            raise SpecError(
                f"operators are the names of records, in a tuple, got {given!r}",
                where="operators",
                fix='("conv2d",)',
            )
        object.__setattr__(self, "operators", tuple(given))
        with within("where"):
            where = condition_from(self.where)
        if where is None:
            raise SpecError(
                "a record says for which sizes it holds",
                where="where",
                fix="leave the operator out of the backend's entries if it is always slower",
            )
        object.__setattr__(self, "where", where)
        if not isinstance(self.measured, str) or not self.measured.strip():
            raise SpecError(f"measured is a text, got {self.measured!r}", where="measured")
        for name in _TIMES:
            check_number(getattr(self, name), name)
            if not (getattr(self, name) or 0) > 0:
                raise SpecError(f"a time is more than 0, got {getattr(self, name)!r}", where=name)
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
        found = condition_from(self.where)
        assert found is not None  # checked when it was made
        return found

    def to_dict(self) -> dict[str, Any]:
        """The fields, with the condition as data.

        >>> KnownSlower(("lstm",), {"hidden_size": {"max": 63}}, "a case", 2.0, 1.0).to_dict()["where"]
        {'hidden_size': {'max': 63}}
        """
        return {
            "operators": list(self.operators),
            "where": condition_data(self.condition),
            "measured": self.measured,
            **{name: getattr(self, name) for name in _TIMES},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KnownSlower:
        """The inverse of ``to_dict``. Raises ``SpecError`` for an unknown key.

        >>> one = KnownSlower(("lstm",), {"hidden_size": {"max": 63}}, "a case", 2.0, 1.0)
        >>> KnownSlower.from_dict(one.to_dict()) == one
        True
        """
        names = [field.name for field in fields(cls)]
        check_keys(values, names, "KnownSlower")
        return cls(**{**dict.fromkeys(names), **values})


def known_slower_from(given: Any) -> tuple[KnownSlower, ...]:
    """Records, or their dicts, as a tuple of records. Raises ``SpecError`` with the place.

    >>> known_slower_from(())
    ()
    """
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise SpecError(f"records stand in a tuple, got {given!r}", where="slower")
    found = []
    for index, item in enumerate(given):
        with within(f"slower[{index}]"):
            record = KnownSlower.from_dict(item) if isinstance(item, Mapping) else item
            if not isinstance(record, KnownSlower):
                raise SpecError(f"expected a KnownSlower, got {item!r}")
        found.append(record)
    return tuple(found)
