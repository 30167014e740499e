"""What a backend leaves in float by default, and the places of a request where that does not hold."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import fx

from backquant.backend_config import BackendConfig, DefaultOverride, LeaveFloat
from backquant.backend_config.naming import operator_name
from backquant.graph import GraphIndex, Scope
from backquant.match.float_places import calls_one_of, find_float_places, keys_of
from backquant.match.plan import Decision, MatchKind, Plan, Reason, RuleKind, RuleRef
from backquant.qconfig import QConfigMapping, qconfig_equals
from backquant.qconfig.build import ptq_qconfig


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


# What a backend leaves in float by default, as rules of the mapping.
#
# ``get_default_qconfig_mapping`` is PyTorch's, and asks for everything; this is the choice of ``quantize``
# and ``explain`` where the request names no place. Each place becomes a rule by module, operator and
# number, so that the plan says of each operator why it stays float.

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


@dataclass(frozen=True)
class Draft:
    """A fused graph with a plan for it, and what that was made for: further rules are chosen by it."""

    module: fx.GraphModule
    scopes: Mapping[str, Scope]
    plan: Plan
    backend: BackendConfig
    mapping: QConfigMapping
    by_default: DefaultRules

    @cached_property
    def graph(self) -> GraphIndex:
        """The nodes by name, with what they call."""
        return GraphIndex(self.module)

    @cached_property
    def places(self) -> dict[str, Place]:
        """Module, operator and number of each call, as rules count them."""
        uses: Counter[tuple[str, Any]] = Counter()
        found: dict[str, Place] = {}
        for node in self.module.graph.nodes:
            scope = self.scopes.get(node.name, Scope("", None))
            if node.op in ("call_function", "call_method"):
                path, kind = scope.path, node.target
            elif node.op == "call_module" and node.name in self.scopes:
                path, kind = scope.parent, scope.module_type
            else:
                continue
            found[node.name] = (path, kind, uses[path, kind])
            uses[path, kind] += 1
        return found

    def is_named(self, node: str) -> bool:
        """Whether the request names the place of this node."""
        return self.by_default.named(self.plan.decisions[node])

    def in_float(self, nodes: Iterable[str]) -> QConfigMapping:
        """The mapping with a rule for the place of each of these nodes, which leaves it in float."""
        result = copy.copy(self.mapping)
        for node in nodes:
            result.set_module_name_object_type_order(*self.places[node], None)
        return result


#: Chooses further rules for a draft; ``None``: none.
Choice = Callable[[Draft], ChosenRules | None]


def rules_for_places(draft: Draft) -> ChosenRules | None:
    """The rules for what the backend leaves in float in this graph; ``None`` where it leaves nothing.

    Operators that stay float anyway get no rule, nor do those at places that the mapping names.
    """
    rules = draft.by_default.rules
    if not any(rule.at_places for rule in rules):
        return None
    found = tuple(
        left
        for left in find_float_places(draft.graph, rules)
        if left.node in draft.places
        and draft.graph.nodes[left.node].op != "call_method"  # these rules are for functions
        and draft.plan.decisions[left.node].quantized
        and not draft.is_named(left.node)
    )
    notes = []
    for position, rule in enumerate(rules):
        if names := [left.node for left in found if left.rule == position]:
            many = f"{len(names)} stay float by default on {draft.backend.name}"
            notes.append(f"{many} ({first_of(names)}): {_why(rule)}")
    return ChosenRules(draft.in_float(one.node for one in found), tuple(notes)) if found else None


def rules_for_reasons(draft: Draft, reasons: Mapping[str, Reason], why: str) -> ChosenRules | None:
    """Rules that leave the nodes with ``reasons`` in float, but what the request names; ``None`` for none."""
    left = {
        name: reason
        for name, reason in reasons.items()
        if name in draft.places and not draft.is_named(name)
    }
    if not left:
        return None
    note = f"{len(left)} stay float by default on {draft.backend.name}, as {why} ({first_of(left)})"
    return ChosenRules(draft.in_float(left), (note,), left)


def first_of(names: Iterable[str]) -> str:
    """The first of some names, and whether there are more.

    >>> first_of("abc"), first_of("abcd")
    ('a, b, c', 'a, b, c, …')
    """
    listed = list(names)
    return ", ".join(listed[:_SHOWN]) + (", …" if len(listed) > _SHOWN else "")


def _why(rule: LeaveFloat) -> str:
    words = " or ".join(dict.fromkeys(operator_name(one) for one in rule.operators))
    places = [
        f"{word} {', '.join(map(operator_name, operators))}"
        for word, operators in (("after", rule.after), ("before", rule.before))
        if operators
    ]
    places += ["with a mask or table"] if rule.with_table else []
    return f"{words} {' or '.join(places)}"


# Rules for operators whose neighbours stay float, from the backend's defaults for such operators.
#
# Like ``default_places``, used by ``quantize`` and ``explain`` when no mapping was passed. A first plan, made
# with the usual defaults, shows which neighbours would be quantized.


def rules_between_floats(draft: Draft) -> ChosenRules | None:
    """The rules for operators between float operators; ``None`` where there are none.

    A module that is called several times gets a rule only where this is true of every call. What the request
    names gets none.
    """
    defaults = draft.backend.defaults
    overrides = [o for o in defaults.overrides if o.between_float_operators] if defaults else []
    if defaults is None or not overrides:
        return None
    around = _Around(draft)
    result = copy.copy(draft.mapping)
    notes = []
    for override in overrides:
        qconfig = ptq_qconfig(defaults, override)
        nodes = [n for n in around.between_floats(override) if not draft.is_named(n.name)]
        for node in nodes:
            if node.op == "call_module":
                result.set_module_name(draft.plan.decisions[node.name].module_path, qconfig)
            else:
                result.set_module_name_object_type_order(*draft.places[node.name], qconfig)
        if nodes:
            words = " or ".join(dict.fromkeys(operator_name(one) for one in override.operators))
            asked = override.activation
            how = "dynamically " if asked is not None and asked.is_dynamic else ""
            many = f"{len(nodes)} are quantized {how}by default on {draft.backend.name}"
            notes.append(f"{many}: {words} between float operators")
    return ChosenRules(result, tuple(notes)) if notes else None


class _Around:
    """What is quantized around the operators of a plan."""

    def __init__(self, draft: Draft) -> None:
        self.graph, self.plan, self.backend = draft.graph, draft.plan, draft.backend
        self.entries = {name: match.entry for match in self.plan.matches for name in match.nodes}

    def between_floats(self, override: DefaultOverride) -> list[fx.Node]:
        """The nodes that get rules: the root of each such pattern. Of a module either all calls or none."""
        wanted = keys_of(override.operators)
        found: list[fx.Node] = []
        elsewhere: set[str] = set()
        for match in self.plan.matches:
            root = self.graph.nodes[match.root]
            if match.kind is not MatchKind.PATTERN or not calls_one_of(self.graph, root, wanted):
                continue
            if not self.plan.decisions[match.root].quantized:
                continue
            if self._stands_alone(match.nodes):
                found.append(root)
            else:
                elsewhere.add(self._module(root))
        return [n for n in found if n.op != "call_module" or self._module(n) not in elsewhere]

    def _module(self, node: fx.Node) -> str:
        return self.plan.decisions[node.name].module_path

    def _stands_alone(self, names: tuple[str, ...]) -> bool:
        nodes = (self.graph.nodes[name] for name in names)
        around = (n for node in nodes for n in (*node.all_input_nodes, *node.users))
        return not any(self._is_integer(node) for node in around if node.name not in names)

    def _is_integer(self, node: fx.Node) -> bool:
        """Whether static integers go in and out of it."""
        decision = self.plan.decisions.get(node.name)
        if decision is None or not decision.quantized:
            return False
        entry = self.entries.get(node.name, -1)
        if entry < 0 or decision.dtype_config is None:
            return True
        return (
            not self.backend.shared_configs[entry].dtype_configs[decision.dtype_config].is_dynamic
        )
