"""The float graph and the reference graph of one model as one, in which each operator can be either.

Both have the same names. What the reference graph has beside them rounds values to integers and back, and is
run for whom it is for:

1. a quantized operator is run as the reference graph has it: on rounded inputs, with its integer weight;
2. the result of a quantized operator is rounded for all who read it, where the reference graph rounds it;
3. a float operator is run as the float graph has it, on what its inputs became.

A group holds the operators that can only be quantized together: those of one match (what is fused), and
matches whose results share an observer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from backquant.accuracy.reference_run import last_uses, placeholders, run_node
from backquant.calibrate.feed import measured_inputs
from backquant.convert import reference_state
from backquant.match.plan import MatchKind
from backquant.prepare import Record, unobserved

_OUTSIDE = -1


@dataclass(frozen=True)
class Group:
    """Operators that are quantized together; ``name`` is what a person calls them."""

    name: str
    operator: str
    nodes: tuple[str, ...]
    anchors: tuple[str, ...]


class Twin:
    """``prepared`` and the ``reference`` model that it was converted to; neither is changed.

    ``of``: the group of a node by its name. ``rounded``: the node of the reference graph that holds the
    rounded result of an operator. Custom and standalone modules are in no group: they stay float.
    """

    def __init__(self, prepared: fx.GraphModule, reference: fx.GraphModule) -> None:
        self.float_graph = unobserved(prepared)
        self.reference = reference
        self.record: Record = reference_state(reference)
        self.measured = measured_inputs(reference)
        self.nodes = list(self.float_graph.graph.nodes)
        self.names = frozenset(node.name for node in self.nodes)
        self.twins = {node.name: node for node in reference.graph.nodes}
        self.groups = tuple(_groups(self.record))
        self.of = {name: i for i, group in enumerate(self.groups) for name in group.nodes}
        self.roots = self._roots()
        self.made_of: dict[str, list[str]] = {}
        for made, values in self.roots.items():
            for value in values:
                self.made_of.setdefault(value, []).append(made)
        self.rounded = self._rounded()
        self.place = {node.name: index for index, node in enumerate(self.nodes)}
        self.last = last_uses((node.name, self._reads(node)) for node in self.nodes)

    def inputs(self, batch: Any, index: int) -> dict[str, Any]:
        """``placeholders`` of both graphs."""
        return placeholders(self.float_graph, batch, index, self.measured)

    def first(self, group: int) -> int:
        """The position of the first operator of a group."""
        return min(self.place[name] for name in self.groups[group].nodes if name in self.place)

    def _roots(self) -> dict[str, tuple[str, ...]]:
        """What each node that is only in the reference graph is made of, by values of the float graph."""
        found: dict[str, tuple[str, ...]] = {}
        for node in self.reference.graph.nodes:
            if node.name not in self.names:
                reads = (self._root(found, read) for read in node.all_input_nodes)
                found[node.name] = tuple(dict.fromkeys(name for names in reads for name in names))
        return found

    def _root(self, found: Mapping[str, tuple[str, ...]], read: fx.Node) -> tuple[str, ...]:
        return (read.name,) if read.name in self.names else found[read.name]

    def _rounded(self) -> dict[str, fx.Node]:
        """Rule 2: where an operator has an output site, the first node behind it that is read as a float."""
        outputs = {site.producer for site in self.record.sites.sites if site.producer}
        found: dict[str, fx.Node] = {}
        for name in outputs & self.of.keys():
            node = self.twins.get(name)
            inserted = [u for u in node.users if u.name not in self.names] if node else []
            if node is not None and len(inserted) == len(node.users) == 1:
                [made] = inserted
                behind = [u for u in made.users if u.name not in self.names]
                if len(behind) == len(made.users) == 1:
                    found[name] = behind[0]
        return found

    def _reads(self, node: fx.Node) -> Iterator[str]:
        yield from (read.name for read in node.all_input_nodes)
        twin = self.twins.get(node.name)
        for read in twin.all_input_nodes if twin is not None else ():
            yield from self._root(self.roots, read)


class Walk:
    """One run over a ``Twin`` on one batch. ``quantized`` says of a group whether it is."""

    def __init__(
        self, twin: Twin, inputs: Mapping[str, Any], quantized: Callable[[int], bool]
    ) -> None:
        self.twin = twin
        self.quantized = quantized
        self.values = dict(inputs)
        self.inserted: dict[str, Any] = {}
        self.done = 0

    def fork(self, quantized: Callable[[int], bool]) -> Walk:
        """A run that goes on from here, otherwise; the values so far are shared."""
        other = Walk.__new__(Walk)
        other.twin, other.quantized, other.done = self.twin, quantized, self.done
        other.values, other.inserted = dict(self.values), dict(self.inserted)
        return other

    def to(self, end: int) -> None:
        """Run up to, and without, the node at ``end``."""
        nodes = self.twin.nodes
        while self.done < end:
            node = nodes[self.done]
            if node.op != "placeholder":
                self.values[node.name] = self._value(node)
            for name in self.twin.last.get(node.name, ()):
                self.values.pop(name, None)
                for made in self.twin.made_of.get(name, ()):
                    self.inserted.pop(made, None)
            self.done += 1

    def output(self) -> Any:
        """Run to the end; what the model returns."""
        self.to(len(self.twin.nodes))
        return self.values["output"]

    def held_bytes(self) -> int:
        """The size of the values that are held now; memory that several of them share counts once."""
        held = tree_leaves((self.values, self.inserted))
        storages = (each.untyped_storage() for each in held if isinstance(each, Tensor))
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def is_quantized(self, name: str) -> bool:
        """Whether the operator of this name is, in this run."""
        group = self.twin.of.get(name, _OUTSIDE)
        return group != _OUTSIDE and self.quantized(group)

    def inputs_of(self, node: fx.Node) -> Any:
        """The arguments of an operator in this run: positional ones, and those by keyword."""
        twin = self.twin.twins.get(node.name)
        if twin is not None and self.is_quantized(node.name):
            return fx.node.map_arg((twin.args, twin.kwargs), self._read)
        return fx.node.map_arg((node.args, node.kwargs), self._seen)

    def _value(self, node: fx.Node) -> Any:
        twin = self.twin.twins.get(node.name)
        if twin is not None and self.is_quantized(node.name):
            return run_node(self.twin.reference, twin, self._read)
        return run_node(self.twin.float_graph, node, self._seen)

    def _read(self, node: fx.Node) -> Any:
        """A value as the reference graph has it."""
        if node.name in self.twin.names:
            return self.values[node.name]
        if node.name not in self.inserted:
            self.inserted[node.name] = run_node(self.twin.reference, node, self._read)
        return self.inserted[node.name]

    def _seen(self, node: fx.Node) -> Any:
        """A value as a float operator reads it: rule 2."""
        rounded = self.twin.rounded.get(node.name)
        if rounded is not None and self.is_quantized(node.name):
            return self._read(rounded)
        return self.values[node.name]


def _groups(record: Record) -> Iterator[Group]:
    """Matches that are quantized, joined where their results share an observer."""
    plan = record.plan
    quantized = [
        match
        for match in plan.matches
        if match.kind is MatchKind.PATTERN and plan.decisions[match.anchor].quantized
    ]
    head: dict[str, str] = {}  # of the observer: the first match that gives a result to it
    tied = {match.anchor: match.anchor for match in quantized}
    for site in record.sites.sites:
        if site.producer in tied:
            tied[site.producer] = head.setdefault(site.group, site.producer)
    members: dict[str, list[Any]] = {}
    for match in quantized:
        members.setdefault(tied[match.anchor], []).append(match)
    for matches in members.values():
        nodes = tuple(dict.fromkeys(name for match in matches for name in match.nodes))
        anchors = tuple(match.anchor for match in matches)
        decisions = [plan.decisions[match.root] for match in matches]
        names = dict.fromkeys(d.module_path or d.node for d in decisions)
        kinds = dict.fromkeys(match.pattern for match in matches)
        yield Group(" + ".join(names), ", ".join(kinds), nodes, anchors)
