"""Where the entries of a backend occur in a graph, and how each occurrence is observed."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    GraphPattern,
    ObservationType,
    Port,
    is_for_inference_only,
)
from backquant.backend_config.conditions import has_conditions, part_names
from backquant.graph import GraphIndex, known_types, node_arguments, nodes_in
from backquant.graph.edit import weighted_part
from backquant.graph.shapes import GraphValues
from backquant.match.fusion import flattened, keeps_channels, root_of, unseen_rank
from backquant.match.matcher import Found, Matcher, PatternIndex
from backquant.match.plan import Match, MatchKind, PortUse
from backquant.match.refusal import entry_text, op_name
from backquant.operators import find

_SHARES = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT


@dataclass(frozen=True)
class Occurrence:
    """One match with its nodes.

    ``config`` is ``None`` for standalone and custom modules. ``observation`` is ``None`` when the
    entry has no observation type for this number of tensor arguments, ``tensors``.
    """

    match: Match
    members: tuple[fx.Node, ...]  # graph order; the last is the anchor
    root: fx.Node
    config: BackendPatternConfig | None
    observation: ObservationType | None
    tensors: int
    # by the names that conditions (`where`) give them
    parts: Mapping[str, fx.Node] = field(default_factory=dict)

    @property
    def anchor(self) -> fx.Node:
        """The node whose output is observed."""
        return self.members[-1]


def find_occurrences(
    graph: GraphIndex,
    patterns: PatternIndex,
    backend: BackendConfig,
    special: Mapping[fx.Node, MatchKind] | None = None,
    declined: Collection[tuple[str, int]] = (),
    values: GraphValues | None = None,
) -> list[Occurrence]:
    """All occurrences, in graph order of their anchors.

    ``special`` holds the nodes that call standalone and custom modules; they come before patterns.
    ``declined``: pairs of anchor and entry that are no match; another entry may then be one.
    ``values``: by them a batch norm is matched with the layer that it is folded into after training.

    Raises:
        ConfigError: a root getter fails or returns no node of its match.

    >>> import torch
    >>> gm = fx.symbolic_trace(lambda x: torch.relu(x))
    >>> backend = BackendConfig("b").set_backend_pattern_config(BackendPatternConfig(torch.relu))
    >>> found = find_occurrences(GraphIndex(gm), PatternIndex(backend), backend)
    >>> [occurrence.match.pattern for occurrence in found]
    ['torch.relu']
    """
    whole_modules = [_special(node, kind, graph) for node, kind in (special or {}).items()]
    taken = [node for occurrence in whole_modules for node in occurrence.members]

    known = values or GraphValues(None)

    def accepts(match: Found) -> bool:
        if (match.anchor.name, match.candidate.entry) in declined:
            return False
        fuser, nodes = match.candidate.config.fuser_method, match.members
        if fuser is None:
            return True
        if not keeps_channels(nodes, graph, known):
            return False  # cannot be fused; the layer and the norm are then matched separately
        return not is_for_inference_only(fuser) or unseen_rank(nodes, graph, known) is None

    found = Matcher(graph, patterns, accepts).run(skip=taken)
    matched = [_occurrence(match, graph, backend) for match in found]
    return sorted([*whole_modules, *matched], key=lambda item: graph.position[item.anchor])


def _special(node: fx.Node, kind: MatchKind, graph: GraphIndex) -> Occurrence:
    name = op_name(type(graph.module_of(node)))
    match = Match(-1, name, (node.name,), node.name, kind)
    own = ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
    return Occurrence(match, (node,), node, None, own, _tensor_arguments(node, graph))


def _occurrence(found: Found, graph: GraphIndex, backend: BackendConfig) -> Occurrence:
    candidate = found.candidate
    root = root_of(found, backend, flattened)
    members = tuple(sorted(found.members, key=graph.position.__getitem__))
    names = tuple(node.name for node in members)
    match = Match(
        candidate.entry,
        entry_text(candidate.config),
        names,
        root.name,
        ports=port_uses(found),
        open_readers=open_readers(found),
        weighted=weighted(found, root, graph),
    )
    tensors = _tensors_in(match, graph) if match.ports else _tensor_arguments(root, graph)
    by_count = candidate.config._num_tensor_args_to_observation_type
    observation = by_count.get(tensors) if by_count else candidate.config.observation_type
    parts = _named_parts(found) if has_conditions(candidate.config) else {}
    return Occurrence(match, members, root, candidate.config, observation, tensors, parts)


def _named_parts(found: Found) -> dict[str, fx.Node]:
    names = part_names(found.candidate.config).items()
    bound = ((name, found.bound[position]) for name, position in names)
    return {name: value for name, value in bound if isinstance(value, fx.Node)}


def _tensor_arguments(root: fx.Node, graph: GraphIndex) -> int:
    """How many arguments may be tensors. PyTorch does not count those given by keyword."""
    return sum(
        isinstance(value, fx.Node) and not graph.has_no_tensors(value)
        for value in node_arguments(root)
    )


def _tensors_in(match: Match, graph: GraphIndex) -> int:
    """How many inputs of a graph pattern may be tensors."""
    values = (graph.nodes[name] for port in match.ports if port.readers for name in port.values)
    return sum(not graph.has_no_tensors(value) for value in values)


def valueless_nodes(
    graph: GraphIndex, occurrences: Iterable[Occurrence], values: GraphValues | None = None
) -> frozenset[str]:
    """Names of nodes whose value is certainly no float tensor: sizes, masks, indices.

    ``values``: where integers are among the inputs, also what they show to be none.

    >>> gm = fx.symbolic_trace(lambda x: x.view(x.size(0), -1))
    >>> sorted(valueless_nodes(GraphIndex(gm), []))
    ['size']
    """
    shares = {
        node
        for occurrence in occurrences
        if occurrence.observation is _SHARES or _is_beside_a_number(occurrence)
        for node in occurrence.members
    }
    known = known_types(graph.graph, shares.__contains__)
    computed = (node for node in graph.calls() if graph.has_no_tensors(node))
    integers = _integer_constants(graph, shares)
    tuples = _tuples_passed_on(graph, shares)
    shown = () if values is None else values.integers
    return frozenset((*(node.name for node in (*known, *computed, *integers, *tuples)), *shown))


def _is_beside_a_number(occurrence: Occurrence) -> bool:
    """Whether it is arithmetic with one tensor: a mask or an index then stays one."""
    config = occurrence.config
    by_count = config is not None and config._num_tensor_args_to_observation_type
    return bool(by_count) and occurrence.tensors == 1


def whole_tuples(graph: GraphIndex) -> frozenset[str]:
    """Names of nodes that give tuples which are joined as they are (``torch.cat(x.chunk(2))``), of what
    joins them, and of poolings that give indices, too: a tuple is not observed.

    >>> gm = fx.symbolic_trace(lambda x: torch.cat(x.chunk(3)[1:]) + torch.cat([x, x]))
    >>> sorted(whole_tuples(GraphIndex(gm)))
    ['cat', 'chunk', 'getitem']
    """
    found: set[str] = set()
    for node in graph.calls():
        if getattr(graph.module_of(node), "return_indices", False):
            found.add(node.name)
        known = find(node.target) if node.op == "call_function" else None
        source = node.args[0] if node.args else node.kwargs.get("tensors")
        if known is None or not known.takes_list or not isinstance(source, fx.Node):
            continue
        found.add(node.name)
        while isinstance(source, fx.Node):
            found.add(source.name)
            is_part = source.target is operator.getitem and isinstance(source.args[1], slice)
            source = source.args[0] if is_part else None
    return frozenset(found)


def _tuples_passed_on(graph: GraphIndex, shares: Collection[fx.Node]) -> set[fx.Node]:
    """Values that the operators ``shares`` make of a recurrent layer's whole result: tuples, which are
    not observed."""
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        source = node.args[0] if node in shares and node.args else None
        if not isinstance(source, fx.Node) or node.target is operator.getitem:
            continue
        if source in found or graph.gives_tuple(source):
            found.add(node)
    return found


def _integer_constants(graph: GraphIndex, shares: Collection[fx.Node]) -> set[fx.Node]:
    """Integer and boolean tensors of the model (positions, masks), and what ``shares`` select from
    them. PyTorch observes them, which its histograms refuse.
    """
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            path, _, name = str(node.target).rpartition(".")
            tensor = getattr(graph.modules.get(path), name, None)
            if isinstance(tensor, torch.Tensor) and not (
                tensor.is_floating_point() or tensor.is_complex()
            ):
                found.add(node)
        elif node in shares and node.args:
            first = node.args[0]
            inputs = first if isinstance(first, (list, tuple)) else (first,)
            if inputs and all(isinstance(each, fx.Node) and each in found for each in inputs):
                found.add(node)
    return found


# The named inputs and the output of a graph pattern in one occurrence.


def port_uses(found: Found) -> tuple[PortUse, ...]:
    """Inputs, then the output; none for patterns that have no names.

    >>> import torch
    >>> from backquant.backend_config import BackendConfig, BackendPatternConfig
    >>> from backquant.graph import GraphIndex, nodes_in
    >>> from backquant.match.matcher import PatternIndex
    >>> from backquant.match.matcher import Matcher
    >>> swish = GraphPattern(["x"], {"gate": (torch.sigmoid, "x"), "out": (torch.mul, "x", "gate")})
    >>> backend = BackendConfig("b").set_backend_pattern_config(BackendPatternConfig(swish))
    >>> gm = fx.symbolic_trace(lambda x: torch.mul(x, torch.sigmoid(x)))
    >>> found = Matcher(GraphIndex(gm), PatternIndex(backend)).run()[0]
    >>> [(use.name, use.values, use.readers) for use in port_uses(found)]
    [('x', ('x',), ('sigmoid', 'mul')), ('out', ('mul',), ())]
    """
    config = found.candidate.config
    pattern = config.pattern
    if not isinstance(pattern, GraphPattern):
        return ()
    bound = pattern.named(found.bound)
    uses = []
    for name in pattern.ports:
        port = config.ports.get(name, Port())
        values = tuple(dict.fromkeys(node.name for node in nodes_in(bound[name])))
        readers = tuple(_readers(found, name)) if name in pattern.inputs else ()
        uses.append(PortUse(name, values, readers, port.role, port.shares_with or ""))
    return tuple(uses)


def open_readers(found: Found) -> tuple[str, ...]:
    """The operators of a graph pattern whose arguments it does not list."""
    if not isinstance(found.candidate.config.pattern, GraphPattern):
        return ()
    pairs = zip(found.candidate.pattern.nodes, found.bound, strict=True)
    return tuple(
        value.name
        for part, value in pairs
        if part.inputs is None and part.kind not in ("any", "literal")
    )


def weighted(found: Found, root: fx.Node, graph: GraphIndex) -> tuple[str, ...]:
    """The operators of a graph pattern whose modules become reference modules.

    These are the root, and all modules of the class of the entry's root module, fused or not.
    """
    config = found.candidate.config
    if not isinstance(config.pattern, GraphPattern):
        return ()
    names = []
    for node in found.members:
        module = graph.module_of(node)
        if module is not None and (node is root or _root_class(module) is config.root_module):
            names.append(node.name)
    return tuple(names)


def _root_class(module: nn.Module) -> type:
    """The class of a module, or of the first part of a fused one."""
    first = weighted_part(module)
    return type_before_parametrizations(first)


def _readers(found: Found, name: str) -> Iterator[str]:
    pattern = found.candidate.config.pattern
    assert isinstance(pattern, GraphPattern)
    position = pattern.names.index(name)
    for part, value in zip(found.candidate.pattern.nodes, found.bound, strict=True):
        if position in (part.inputs or ()):
            yield value.name
