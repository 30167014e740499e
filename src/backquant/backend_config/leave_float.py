"""Operators, or results of operators, that stay in float at some places of a model, as data.

The one form of such rules. Where a rule stands says when it holds: in ``BackendDefaults`` while nobody asks
for anything in particular (a choice: what costs more than it saves), in ``QDQRules`` always (what a
deployment target cannot do, or does worse).

A residual addition of a transformer adds to a sum that grows with depth: quantizing it cost 19 dB on a
ViT, where the layers around it lose nothing. An addition that masks attention scores adds the lowest
float, which no scale can hold beside the scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from backquant.backend_config.declared import Earlier, Phrase, Record, earlier_names
from backquant.backend_config.kinds import Operators
from backquant.errors import SpecError


@earlier_names
@dataclass(frozen=True, repr=False)
class LeaveFloat(Record):
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

    operators: Annotated[tuple[Any, ...], Operators()]
    after: Annotated[
        tuple[Any, ...],
        Operators(),
        "Where they read what one of these computes.",
        Phrase("after {}"),
    ] = ()
    before: Annotated[
        tuple[Any, ...],
        Operators(),
        "Where one of these reads what they compute.",
        Phrase("before {}"),
    ] = ()
    with_table: Annotated[
        bool,
        "Where they read a mask or a table: a value that depends on no float input.",
        Phrase("with a mask or table"),
    ] = False
    unless_between_quantized: Annotated[
        bool,
        "Where an activation that they read is float, or no quantized operator reads them.",
        Phrase("unless between quantized operators"),
        Earlier("beside_float"),
    ] = False
    results: Annotated[
        bool,
        "Only their results, where no quantized operator reads them. Stands alone.",
        Phrase("results that only float operators read"),
    ] = False
    shown_bare: ClassVar[int] = 1

    def _check(self) -> None:
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
