"""What a backend leaves in float by default, as rules of the mapping.

``get_default_qconfig_mapping`` is PyTorch's, and asks for everything; this is the choice of ``quantize``
and ``explain`` where the request names no place. Each place becomes a rule by module, operator and number, so
that the plan says of each operator why it stays float.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import fx

from backquant.backend_config import BackendConfig, LeaveFloat
from backquant.backend_config.naming import operator_name
from backquant.graph import GraphIndex, Scope
from backquant.match.default_rules import DefaultRules
from backquant.match.float_places import FloatPlace, find_float_places
from backquant.match.plan import Plan, Reason
from backquant.qconfig import QConfigMapping

_SHOWN = 3
#: Module, operator, and which use of it.
Place = tuple[str, Any, int]


class ChosenRules(NamedTuple):
    """The mapping with a rule for each place, and a note for each kind of place. ``reasons``: why nodes
    stay float, by name, where there is a better reason than that no rule asks for them.
    ``separate_layers``: names of stacked recurrent modules that are to be split into their layers; the rules
    are then chosen again."""

    mapping: QConfigMapping
    notes: tuple[str, ...]
    reasons: Mapping[str, Reason] = MappingProxyType({})
    separate_layers: tuple[str, ...] = ()


class Draft(NamedTuple):
    """A fused graph with a plan for it, and what that was made for: further rules are chosen by it."""

    module: fx.GraphModule
    scopes: Mapping[str, Scope]
    plan: Plan
    backend: BackendConfig
    mapping: QConfigMapping
    by_default: DefaultRules

    def is_named(self, node: str) -> bool:
        """Whether the request names the place of this node."""
        return self.by_default.named(self.plan.decisions[node])


#: Chooses further rules for a draft; ``None``: none.
Choice = Callable[[Draft], ChosenRules | None]


def rules_for_places(draft: Draft) -> ChosenRules | None:
    """The rules for what the backend leaves in float in this graph; ``None`` where it leaves nothing.

    Operators that stay float anyway get no rule, nor do those at places that the mapping names.
    """
    module, scopes, plan, backend, mapping, by_default = draft
    rules = by_default.rules
    if not any(rule.at_places for rule in rules):
        return None
    graph = GraphIndex(module)
    found = find_float_places(graph, rules)
    places = places_of(module, scopes)
    found = tuple(
        left
        for left in found
        if left.node in places
        and graph.nodes[left.node].op != "call_method"  # these rules are for functions
        and plan.decisions[left.node].quantized
        and not by_default.named(plan.decisions[left.node])
    )
    if not found:
        return None
    result = without_places(mapping, (places[left.node] for left in found))
    return ChosenRules(result, tuple(_notes(found, rules, backend)))


def without_places(mapping: QConfigMapping, places: Iterable[Place]) -> QConfigMapping:
    """``mapping`` with a rule that leaves each of these places in float.

    >>> found = without_places(QConfigMapping(), [("", abs, 0)])
    >>> found.module_name_object_type_order_qconfigs[("", abs, 0)] is None
    True
    """
    result = copy.copy(mapping)
    for place in places:
        result.set_module_name_object_type_order(*place, None)
    return result


def places_of(module: fx.GraphModule, scopes: Mapping[str, Scope]) -> dict[str, Place]:
    """Module, operator and number of each call, as rules count them.

    >>> places_of(fx.symbolic_trace(lambda x: abs(x)), {})
    {'abs_1': ('', <built-in function abs>, 0)}
    """
    uses: Counter[tuple[str, Any]] = Counter()
    found: dict[str, Place] = {}
    for node in module.graph.nodes:
        scope = scopes.get(node.name, Scope("", None))
        if node.op in ("call_function", "call_method"):
            path, kind = scope.path, node.target
        elif node.op == "call_module" and node.name in scopes:
            path, kind = scope.parent, scope.module_type
        else:
            continue
        found[node.name] = (path, kind, uses[path, kind])
        uses[path, kind] += 1
    return found


def _notes(
    found: Sequence[FloatPlace], rules: Sequence[LeaveFloat], backend: BackendConfig
) -> list[str]:
    notes = []
    for position, rule in enumerate(rules):
        names = [left.node for left in found if left.rule == position]
        if names:
            shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
            notes.append(
                f"{len(names)} stay float by default on {backend.name} ({shown}): {_why(rule)}"
            )
    return notes


def _why(rule: LeaveFloat) -> str:
    words = " or ".join(dict.fromkeys(operator_name(one) for one in rule.operators))
    places = [
        f"{word} {', '.join(map(operator_name, operators))}"
        for word, operators in (("after", rule.after), ("before", rule.before))
        if operators
    ]
    places += ["with a mask or table"] if rule.with_table else []
    return f"{words} {' or '.join(places)}"
