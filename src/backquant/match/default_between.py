"""Rules for operators whose neighbours stay float, from the backend's defaults for such operators.

Like ``default_places``, used by ``quantize`` and ``explain`` when no mapping was passed. A first plan, made
with the usual defaults, shows which neighbours would be quantized.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

from torch import fx

from backquant.backend_config import BackendConfig, DefaultOverride
from backquant.backend_config.naming import operator_name
from backquant.graph import GraphIndex
from backquant.match.default_places import ChosenRules, Draft, places_of
from backquant.match.float_places import calls_one_of, keys_of
from backquant.match.plan import MatchKind, Plan
from backquant.qconfig.build import ptq_qconfig


def rules_between_floats(draft: Draft) -> ChosenRules | None:
    """The rules for operators between float operators; ``None`` where there are none.

    A module that is called several times gets a rule only where this is true of every call. What the request
    names gets none.
    """
    module, scopes, plan, backend, mapping, _ = draft
    defaults = backend.defaults
    overrides = [o for o in defaults.overrides if o.between_float_operators] if defaults else []
    if defaults is None or not overrides:
        return None
    around = _Around(module, plan, backend)
    places = places_of(module, scopes)
    result = copy.copy(mapping)
    notes = []
    for override in overrides:
        qconfig = ptq_qconfig(defaults, override)
        nodes = around.between_floats(override)
        nodes = [node for node in nodes if not draft.is_named(node.name)]
        for node in nodes:
            if node.op == "call_module":
                result.set_module_name(plan.decisions[node.name].module_path, qconfig)
            else:
                result.set_module_name_object_type_order(*places[node.name], qconfig)
        notes += [_note(backend, override, len(nodes))] if nodes else []
    return ChosenRules(result, tuple(notes)) if notes else None


def _note(backend: BackendConfig, override: DefaultOverride, count: int) -> str:
    words = " or ".join(dict.fromkeys(operator_name(one) for one in override.operators))
    asked = override.activation
    how = "dynamically " if asked is not None and asked.is_dynamic else ""
    return (
        f"{count} are quantized {how}by default on {backend.name}: {words} between float operators"
    )


class _Around:
    """What is quantized around the operators of a plan."""

    def __init__(self, module: fx.GraphModule, plan: Plan, backend: BackendConfig) -> None:
        self.graph, self.plan, self.backend = GraphIndex(module), plan, backend
        self.entries = {name: match.entry for match in plan.matches for name in match.nodes}

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
        return not any(self._is_integer(node) for node in self._neighbours(set(names)))

    def _neighbours(self, names: set[str]) -> Iterator[fx.Node]:
        for name in names:
            node = self.graph.nodes[name]
            yield from (n for n in (*node.all_input_nodes, *node.users) if n.name not in names)

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
