"""What a backend leaves in float by default, and the places of a request where that does not hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from backquant.backend_config import LeaveFloat
from backquant.match.plan import Decision, RuleKind, RuleRef
from backquant.qconfig import QConfigMapping, qconfig_equals


@dataclass(frozen=True)
class DefaultRules:
    """``BackendDefaults.leave_float``, for one request.

    ``names``: the request's rules that name a place: a module by its path, the n-th use of an operator, or
    a type for which the backend itself asks something else. Where one of them applies, it is followed;
    elsewhere (a global rule, a type as the backend has it) the backend's own rules hold.

    ``in_training``: the plan itself leaves the places in float (rules of a mapping are compared at conversion
    with those of the mapping that it gets), and what enters and leaves the model counts as quantized, since
    training rounds it as PyTorch does.
    """

    rules: tuple[LeaveFloat, ...]
    names: frozenset[RuleRef] = frozenset()
    in_training: bool = False

    @classmethod
    def of(
        cls, rules: Iterable[LeaveFloat], asked: QConfigMapping, own: Iterable[QConfigMapping]
    ) -> DefaultRules:
        """The rules for what is ``asked``, beside the backend's ``own`` mappings.

        >>> asked = QConfigMapping().set_global(None).set_module_name("fc", None)
        >>> [str(rule) for rule in DefaultRules.of((), asked, ()).names]
        ['module_name "fc"']
        """
        own = tuple(own)
        if any(asked is mapping for mapping in own):
            own = (asked,)
        names = (
            RuleRef(RuleKind(rule.kind), rule.index, rule.key)
            for rule in asked.rules()
            if rule.kind != RuleKind.GLOBAL.value
            and not (
                rule.kind == RuleKind.OBJECT_TYPE.value
                and any(
                    rule.target in mapping.object_type_qconfigs
                    and qconfig_equals(mapping.object_type_qconfigs[rule.target], rule.qconfig)
                    for mapping in own
                )
            )
        )
        return cls(tuple(rules), frozenset(names))

    def named(self, decision: Decision) -> bool:
        """Whether the request names the place that ``decision`` is about.

        >>> from backquant.match.plan import Outcome
        >>> DefaultRules(()).named(Decision("fc", "Linear", "fc", Outcome.QUANTIZED))
        False
        """
        return decision.rule is not None and decision.rule in self.names


def is_like_default(asked: QConfigMapping, own: Iterable[QConfigMapping]) -> bool:
    """Whether ``asked`` is one of the backend's ``own`` mappings, or one with other rules for places: what
    no rule names is asked as the backend asks it.

    >>> from backquant.qconfig import per_channel_dynamic_qconfig
    >>> own = QConfigMapping().set_global(per_channel_dynamic_qconfig)
    >>> asked = QConfigMapping().set_global(per_channel_dynamic_qconfig).set_module_name("fc", None)
    >>> is_like_default(asked, [own]), is_like_default(QConfigMapping(), [own])
    (True, False)
    """
    wanted = asked.global_qconfig
    return any(
        asked is one or (wanted is not None and qconfig_equals(wanted, one.global_qconfig))
        for one in own
    )
