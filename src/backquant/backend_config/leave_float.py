"""Operators, or results of operators, that stay in float at some places of a model, as data.

The one form of such rules. Where a rule stands says when it holds: in ``BackendDefaults`` while nobody asks
for anything in particular (a choice: what costs more than it saves), in ``QDQRules`` always (what a
deployment target cannot do, or does worse).

A residual addition of a transformer adds to a sum that grows with depth: quantizing it cost 19 dB on a
ViT, where the layers around it lose nothing. An addition that masks attention scores adds the lowest
float, which no scale can hold beside the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from backquant.backend_config.checks import check_bool, check_keys, within
from backquant.backend_config.earlier_names import earlier_names
from backquant.backend_config.naming import operator_name
from backquant.backend_config.pattern import normal_form
from backquant.errors import SpecError

_LISTS = ("operators", "after", "before")
_FLAGS = ("with_table", "unless_between_quantized", "results")
EARLIER_NAMES = {"beside_float": "unless_between_quantized"}


@earlier_names(EARLIER_NAMES)
@dataclass(frozen=True, repr=False)
class LeaveFloat:
    """``operators`` stay float where one of the conditions holds. Conditions 1 to 3 ignore, in between,
    operators that only move values, dropout, and products with a parameter.

    1. ``after``: the operator reads the result of one of these operators.
    2. ``before``: its result is read by one of these operators, or by one of ``operators`` that stays
       float by this rule.
    3. ``with_table``: it reads a value that depends on no float input and no parameter of an operator
       (a mask, the angles of a rotary embedding), or only values that stay float by this condition.
    4. ``unless_between_quantized``: an activation that it reads is float, or no quantized operator reads
       its result: there an integer kernel saves less time than the conversions to and from float cost. A
       pattern of several operators stays float if the rule names all of them.

    With ``results=True``, and no condition, the operators are quantized and only their results stay float,
    where no quantized operator reads them (behind operators that only move values): for kernels that can
    return floats.

    A module class also stands for its fused and QAT forms in ``after``, in ``before``, and in the
    ``operators`` of a rule with ``results``. Raises ``SpecError`` for a rule without operators or without a
    condition.

    >>> import operator, torch
    >>> LeaveFloat((operator.add,), after=(torch.nn.Linear,), before=(torch.nn.LayerNorm,))
    LeaveFloat((operator.add,), after=(torch.nn.Linear,), before=(torch.nn.LayerNorm,))
    >>> LeaveFloat((torch.nn.Linear,), results=True)
    LeaveFloat((torch.nn.Linear,), results=True)
    """

    operators: tuple[Any, ...]
    after: tuple[Any, ...] = ()
    before: tuple[Any, ...] = ()
    with_table: bool = False
    unless_between_quantized: bool = False
    results: bool = False

    def __post_init__(self) -> None:
        for name in _LISTS:
            given = getattr(self, name)
            if not isinstance(given, (tuple, list)):
                raise SpecError(f"{name} is a tuple of operators, got {given!r}", where=name)
            object.__setattr__(self, name, tuple(given))
            for index, operator in enumerate(given):
                with within(f"{name}[{index}]"):
                    if normal_form(operator).size > 1:
                        raise SpecError("single operators are named here, not patterns")
        for name in _FLAGS:
            check_bool(getattr(self, name), name)
        if not self.operators:
            raise SpecError("a rule names its operators", where="operators", fix="(torch.add,)")
        if not (self.at_places or self.unless_between_quantized or self.results):
            raise SpecError(
                "the rule says nothing of the places where its operators stay float",
                where="after, before, with_table, unless_between_quantized, results",
                fix="after=(torch.nn.Linear,), or leave the operator out of the backend's entries",
            )
        if self.results and (self.at_places or self.unless_between_quantized):
            raise SpecError(
                "a rule is about operators or about their results",
                where="results",
                fix="two rules: LeaveFloat(operators, results=True) and one with the other conditions",
            )

    @property
    def at_places(self) -> bool:
        """Whether one of the conditions 1 to 3 is set, which depend on the float model alone.

        >>> LeaveFloat(("add",), with_table=True).at_places
        True
        """
        return bool(self.after or self.before or self.with_table)

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set; operators as lists.

        >>> LeaveFloat(("add",), with_table=True).to_dict()
        {'operators': ['add'], 'with_table': True}
        """
        values = {name: list(getattr(self, name)) for name in _LISTS if getattr(self, name)}
        return {**values, **{name: True for name in _FLAGS if getattr(self, name)}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LeaveFloat:
        """The inverse of ``to_dict``. Raises ``SpecError`` for an unknown key.

        >>> LeaveFloat.from_dict({"operators": ["add"], "with_table": True}).operators
        ('add',)
        """
        check_keys(values, [*(field.name for field in fields(cls)), *EARLIER_NAMES], "LeaveFloat")
        return cls(**{"operators": (), **values})

    def __repr__(self) -> str:
        parts = [_tuple(self.operators)]
        parts += [f"{n}={_tuple(getattr(self, n))}" for n in _LISTS[1:] if getattr(self, n)]
        parts += [f"{name}=True" for name in _FLAGS if getattr(self, name)]
        return f"LeaveFloat({', '.join(parts)})"


def _tuple(operators: tuple[Any, ...]) -> str:
    names = ", ".join(map(operator_name, operators))
    return f"({names}{',' if len(operators) == 1 else ''})"


def given_rules(given: Sequence[LeaveFloat]) -> tuple[LeaveFloat, ...]:
    """``given`` as a tuple, checked. Raises ``SpecError`` with the place.

    >>> given_rules([LeaveFloat(("add",), with_table=True)])
    (LeaveFloat((.add(),), with_table=True),)
    """
    if not isinstance(given, (tuple, list)):
        raise SpecError(f"rules stand in a tuple, got {given!r}", where="leave_float")
    for index, rule in enumerate(given):
        if not isinstance(rule, LeaveFloat):
            raise SpecError(f"expected a LeaveFloat, got {rule!r}", where=f"leave_float[{index}]")
    return tuple(given)


def rules_from(items: Any) -> Any:
    """Rules from their dicts (or rules, as they are); what is no list is left for ``given_rules``.

    Raises ``SpecError`` with the place.

    >>> rules_from([{"operators": ["add"], "with_table": True}])
    (LeaveFloat((.add(),), with_table=True),)
    """
    if not isinstance(items, (tuple, list)):
        return () if items is None else items
    rules = []
    for index, item in enumerate(items):
        with within(f"leave_float[{index}]"):
            rules.append(LeaveFloat.from_dict(item) if isinstance(item, Mapping) else item)
    return tuple(rules)
