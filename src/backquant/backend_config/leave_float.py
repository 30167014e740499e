"""Operators that stay in float by default at some places of a model, as data.

A residual addition of a transformer adds to a sum that grows with depth: quantizing it cost 19 dB on a
ViT, where the layers around it lose nothing. An addition that masks attention scores adds the lowest
float, which no scale can hold beside the scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from backquant.backend_config.checks import check_bool, check_keys, within
from backquant.backend_config.naming import operator_name
from backquant.backend_config.pattern import normal_form
from backquant.errors import SpecError

__all__ = ["LeaveFloat"]

_LISTS = ("operators", "after", "before")


@dataclass(frozen=True, repr=False)
class LeaveFloat:
    """``operators`` stay float where one of the conditions holds. Looked through: operators that only
    move values, dropout, and products with a parameter.

    1. ``after``: they read what one of these operators computes.
    2. ``before``: one of these operators reads what they compute, or one of ``operators`` does that stays
       float by this rule.
    3. ``with_table``: they read a value that depends on no float input and no parameter of an operator
       (a mask, the angles of a rotary embedding), or only values that stay float by this condition.

    Raises ``SpecError`` for a rule without operators or without a condition.

    >>> import operator, torch
    >>> LeaveFloat((operator.add,), after=(torch.nn.Linear,), before=(torch.nn.LayerNorm,))
    LeaveFloat((operator.add,), after=(torch.nn.Linear,), before=(torch.nn.LayerNorm,))
    """

    operators: tuple[Any, ...]
    after: tuple[Any, ...] = ()
    before: tuple[Any, ...] = ()
    with_table: bool = False

    def __post_init__(self) -> None:
        for name in _LISTS:
            given = getattr(self, name)
            if not isinstance(given, (tuple, list)):
                raise SpecError(f"{name} is a tuple of operators, got {given!r}", where=name)
            object.__setattr__(self, name, tuple(given))
            for index, operator in enumerate(given):
                with within(f"{name}[{index}]"):
                    normal_form(operator)
        check_bool(self.with_table, "with_table")
        if not self.operators:
            raise SpecError("a rule names its operators", where="operators", fix="(torch.add,)")
        if not (self.after or self.before or self.with_table):
            raise SpecError(
                "the rule says nothing of the places where its operators stay float",
                where="after, before, with_table",
                fix="after=(torch.nn.Linear,), or leave the operator out of the backend's entries",
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set; operators as lists.

        >>> LeaveFloat(("add",), with_table=True).to_dict()
        {'operators': ['add'], 'with_table': True}
        """
        values = {name: list(getattr(self, name)) for name in _LISTS if getattr(self, name)}
        return {**values, "with_table": True} if self.with_table else values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LeaveFloat:
        """The inverse of ``to_dict``. Raises ``SpecError`` for an unknown key.

        >>> LeaveFloat.from_dict({"operators": ["add"], "with_table": True}).operators
        ('add',)
        """
        check_keys(values, [field.name for field in fields(cls)], "LeaveFloat")
        return cls(**{"operators": (), **values})

    def __repr__(self) -> str:
        parts = [_tuple(self.operators)]
        parts += [f"{n}={_tuple(getattr(self, n))}" for n in _LISTS[1:] if getattr(self, n)]
        parts += ["with_table=True"] if self.with_table else []
        return f"LeaveFloat({', '.join(parts)})"


def _tuple(operators: tuple[Any, ...]) -> str:
    names = ", ".join(map(operator_name, operators))
    return f"({names}{',' if len(operators) == 1 else ''})"
