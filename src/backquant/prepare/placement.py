"""The walk that finds observation sites; the rules and their numbers are those of ``sites``."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from backquant.backend_config import BackendConfig
from backquant.graph.queries import input_independent
from backquant.match.plan import Match, MatchKind, Plan, Reason, RuleRef
from backquant.operators.index import (
    computes_on_activations,
    gives_items,
    gives_truths,
    shares_all_inputs,
    spellings,
)
from backquant.prepare.sites import (
    PREFIX,
    Draft,
    ObserverSource,
    ObserverSpec,
    Probe,
    Role,
    Site,
    SiteTable,
    argument_nodes,
    input_positions,
    is_observed,
    observed_arguments,
    shared_port,
)
from backquant.prepare.standalone import interfaces
from backquant.qconfig import PrepareCustomConfig, QConfigMapping
from backquant.reason_codes import ReasonCode

# Groups of sites that share one observer: a union-find table over site names.
#
# The representative is that of the first group of a union, so that the group keeps the observer of the
# operator's first input.


class Groups:
    """Disjoint sets of names; near-constant time per operation.

    >>> groups = Groups()
    >>> groups.unite("a", "b"); groups.unite("c", "d"); groups.unite("b", "c")
    >>> groups.find("d"), groups.find("x")
    ('a', 'x')
    """

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}
        # root of a set -> the name whose observer all members share
        self._head: dict[str, str] = {}
        self._size: dict[str, int] = {}

    def _root(self, name: str) -> str:
        root = name
        while self._parent.get(root, root) != root:
            root = self._parent[root]
        while self._parent.get(name, name) != root:
            self._parent[name], name = root, self._parent[name]
        return root

    def find(self, name: str) -> str:
        """The name whose observer ``name`` uses (itself when it shares with none)."""
        root = self._root(name)
        return self._head.get(root, root)

    def unite(self, first: str, second: str) -> None:
        """Join the groups of both; the joint group uses the observer of ``first``'s."""
        one, two = self._root(first), self._root(second)
        if one == two:
            return
        head = self._head.get(one, one)
        if self._size.get(one, 1) < self._size.get(two, 1):
            one, two = two, one
        self._parent[two] = one
        self._size[one] = self._size.get(one, 1) + self._size.get(two, 1)
        self._head[one] = head


_SHARES = "OUTPUT_SHARE_OBSERVER_WITH_INPUT"
_NOT_OBSERVED = "INPUT_OUTPUT_NOT_OBSERVED"
_FROM_INPUT = "the output takes its qparams from the input, which is not quantized"
_FROM_ITEMS = "a list of tensors of which only items are used"
_UNSIGNED = (torch.quint8, torch.uint8)
_PRODUCTS = frozenset(spellings("matmul"))


def observation_sites(
    module: fx.GraphModule,
    plan: Plan,
    backend_config: BackendConfig,
    qconfig_mapping: QConfigMapping,
    custom: PrepareCustomConfig | None = None,
) -> SiteTable:
    """Where ``plan`` needs observers in the unobserved (fused) graph of ``module``.

    Raises ConfigError when a QConfig makes something that is no observer.
    """
    return Placement(module, plan, backend_config, qconfig_mapping, custom).run()


class Placement:
    """One walk over the graph in its order: O(nodes + edges).

    ``_dtype`` maps a node to the dtype of its value (None: no float tensor; absent: float32),
    ``_current`` a node to the site that its users read instead, ``_read`` a pair (reader, node) to
    the site that this reader's argument becomes, ``_lists`` what gives a list to the sites of its input.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        plan: Plan,
        backend_config: BackendConfig,
        qconfig_mapping: QConfigMapping,
        custom: PrepareCustomConfig | None,
    ) -> None:
        self._module = module
        self._plan = plan
        self._entries = backend_config.shared_configs
        self._source = ObserverSource(backend_config, qconfig_mapping)
        self._positions = input_positions(backend_config)
        self._separate = interfaces(module, plan, custom)
        self._matches = [m for m in plan.matches if self._places(m)]
        self._dtype: dict[str, torch.dtype | None] = self._known_dtypes(custom)
        self._current: dict[str, str] = {}
        self._read: dict[tuple[str, str], str] = {}
        self._lists: dict[str, list[str]] = {}
        self._left_alone = constants_left_alone(module, backend_config)
        self._drafts: dict[str, Draft] = {}
        self._on_value: dict[str, list[Draft]] = {}
        self._groups = Groups()
        self._refused: list[Reason] = []
        self._names = self._free_names()

    def run(self) -> SiteTable:
        """Every site, in the order in which they are to be inserted."""
        readers: dict[str, list[Match]] = {}
        anchors: dict[str, Match] = {}
        for match in self._matches:
            for name in match.readers:
                readers.setdefault(name, []).append(match)
            anchors[match.anchor] = match
        for node in self._module.graph.nodes:
            for match in readers.get(node.name, ()):
                self._place_inputs(node, match)
            if node.name in anchors:
                self._place_output(node, anchors[node.name])
        return SiteTable(tuple(self._finished()), tuple(self._refused))

    def _finished(self) -> Iterator[Site]:
        for draft in self._drafts.values():
            yield draft.finished(self._groups.find(draft.name))

    # -- collected before the graph is walked -------------------------------------------------------

    def _places(self, match: Match) -> bool:
        if match.kind is not MatchKind.PATTERN:
            return match.anchor in self._separate
        return self._plan.decisions[match.anchor].quantized

    def _known_dtypes(self, custom: PrepareCustomConfig | None) -> dict[str, torch.dtype | None]:
        known: dict[str, torch.dtype | None] = {}
        inputs = [node for node in self._module.graph.nodes if node.op == "placeholder"]
        for number in custom.input_quantized_indexes if custom is not None else ():
            if number < len(inputs):
                known[inputs[number].name] = torch.quint8
        scalars = (node.name for node in inputs if defaults_to_scalar(node))
        return {**known, **dict.fromkeys((*self._plan.no_tensors, *scalars))}

    def _free_names(self) -> Iterator[str]:
        number = 0
        while True:
            name = f"{PREFIX}{number}"
            if not hasattr(self._module, name):
                yield name
            number += 1

    def _rule(self, match: Match) -> RuleRef | None:
        return self._plan.decisions[match.anchor].rule

    # -- inputs (rules 2 to 4) ---------------------------------------------------------------------

    def _place_inputs(self, reader: fx.Node, match: Match) -> None:
        if match.anchor in self._separate:
            for argument in self._separate[match.anchor].inputs:
                self._place_input(reader, argument, Role.INPUT, match)
            return
        observation = self._plan.decisions[match.anchor].observation
        gives_none = self._is_no_float_tensor(reader) and not gives_truths(reader.target)
        if observation == _NOT_OBSERVED or gives_none:
            return
        is_product = reader.target in _PRODUCTS  # a constant operand of a product is its weight
        for argument, role in observed_arguments(reader, match, self._positions):
            if is_product or role is not Role.INPUT or argument.name not in self._left_alone:
                self._place_input(reader, argument, role, match)

    def _place_input(self, reader: fx.Node, argument: fx.Node, role: Role, match: Match) -> None:
        value = self._current.get(argument.name, argument.name)
        spec = self._input_spec(role, match)
        probe = self._source.probe(spec)
        every = bool(match.ports) or computes_on_activations(reader.target)
        if not self._needs(value, probe, every or reader.args[:1] == (argument,)):
            if value in self._drafts:
                self._reads(reader, argument, self._drafts[value])
            return
        if role is Role.INPUT and probe.fixed:
            spec = self._measuring(spec)
            probe = self._source.probe(spec)
        draft = self._existing(value, probe) or self._draft(value, role, spec)
        self._reads(reader, argument, draft)

    def _input_spec(self, role: Role, match: Match) -> ObserverSpec:
        part = "activation" if role is Role.INPUT else role.value
        return ObserverSpec(self._rule(match), part)

    def _measuring(self, spec: ObserverSpec) -> ObserverSpec:
        """The observer for an input of an operator with fixed qparams, which are those of its output
        (rule 7).
        """
        return ObserverSpec(spec.rule, "input_of_fixed")

    def _needs(self, value: str, wanted: Probe, zeroth: bool) -> bool:
        have = self._value_dtype(value)
        if have is None or not wanted.observable:
            return False
        if wanted.is_dynamic:
            return zeroth
        if wanted.reuses_input or not (have == torch.float32 or is_observed(have)):
            return False
        return have != wanted.dtype

    def _existing(self, value: str, wanted: Probe) -> Draft | None:
        for draft in self._on_value.get(value, ()):
            probe = self._probe_of(draft.name)
            if probe.kind is wanted.kind and probe.dtype == wanted.dtype:
                return draft
        return None

    def _reads(self, reader: fx.Node, argument: fx.Node, draft: Draft) -> None:
        self._read[reader.name, argument.name] = draft.name
        if reader.name not in draft.readers:
            draft.readers.append(reader.name)

    # -- outputs (rules 5 to 8) --------------------------------------------------------------------

    def _place_output(self, anchor: fx.Node, match: Match) -> None:
        separate = self._separate.get(anchor.name)
        if separate is not None and not separate.observed_output:
            self._dtype[anchor.name] = separate.gives
            return
        decision = self._plan.decisions[anchor.name]
        if self._is_no_float_tensor(anchor) or decision.observation == _NOT_OBSERVED:
            return
        if match.ports and not (self._share_inputs(match) and match.ports[-1].role != "float"):
            return
        spec = self._output_spec(match)
        probe = self._source.probe(spec)
        if not probe.observable or probe.is_dynamic:
            return
        if gives_items(anchor.target):
            self._place_items(anchor, match, spec)
            return
        shares = decision.observation == _SHARES
        if match.ports:
            alone = not shared_port(match, shares=shares or probe.reuses_input)
        else:
            alone = not shares or self._reads_quantized_input(anchor, probe)
            alone = alone and not probe.reuses_input
        if alone:
            self._observe_output(anchor, spec)
        else:
            self._share_output(anchor, match, spec)

    def _place_items(self, anchor: fx.Node, match: Match, spec: ObserverSpec) -> None:
        """Rule 10."""
        self._dtype[anchor.name] = None
        partners, parts = self._partners(anchor, match), items(anchor)
        if partners is None or parts is None:
            self._refuse(match, _FROM_INPUT if partners is None else _FROM_ITEMS)
            return
        self._lists[anchor.name] = partners
        for item in parts:
            decision = self._plan.decisions.get(item.name)
            # otherwise the match of that item places its observer
            if decision is None or not decision.quantized:
                output = self._observe_output(item, spec)
                output.producer = anchor.name
                self._groups.unite(partners[0], output.name)

    def _output_spec(self, match: Match) -> ObserverSpec:
        rule = self._rule(match)
        if match.entry >= 0:
            entry = self._entries[match.entry]
            if entry._overwrite_output_observer or entry._overwrite_output_fake_quantize:
                return ObserverSpec(rule, "output_overwrite", match.entry)
        own = getattr(self._source.qconfig(rule), "output", None) is not None
        shares = self._plan.decisions[match.anchor].observation == _SHARES
        return ObserverSpec(rule, "output" if own and not shares else "activation")

    def _reads_quantized_input(self, anchor: fx.Node, probe: Probe) -> bool:
        """An input that arrives quantized has no observer here: the output then has its own."""
        first = anchor.args[0] if anchor.args else None
        if probe.dtype not in _UNSIGNED or not isinstance(first, fx.Node):
            return False
        return first.op == "placeholder" and (anchor.name, first.name) not in self._read

    def _observe_output(self, anchor: fx.Node, spec: ObserverSpec) -> Draft:
        draft = self._draft(anchor.name, Role.OUTPUT, spec)
        draft.producer = anchor.name
        self._current[anchor.name] = draft.name
        return draft

    def _share_output(self, anchor: fx.Node, match: Match, spec: ObserverSpec) -> None:
        if match.ports:
            partners = self._port_sites(match, shared_port(match, shares=True)) or None
        else:
            partners = self._partners(anchor, match)
        if partners is None:
            # PyTorch counts an observer that it drops here: names stay equal to PyTorch's
            next(self._names)
            self._refuse(match)
            return
        partners = self._separate_from_fixed(anchor.name, match, partners)
        output = self._observe_output(anchor, spec)
        if self._probe_of(partners[0]).fixed and self._is_arithmetic(match):
            return
        for other in (*partners[1:], output.name):
            self._groups.unite(partners[0], other)

    def _partners(self, anchor: fx.Node, match: Match) -> list[str] | None:
        """The sites of the first argument (of a list: of each entry; of an operator that selects: of all
        arguments); None if one of these values is not observed."""
        if anchor.op != "call_module" and shares_all_inputs(anchor.target):
            pair = [argument for argument in anchor.args if isinstance(argument, fx.Node)]
            both = [self._partner(anchor, argument, match) for argument in pair]
            return None if None in both else [site for site in both if site is not None]
        for argument in (*anchor.args, *anchor.kwargs.values()):
            if isinstance(argument, fx.Node):
                entries = [argument]
            elif isinstance(argument, (list, tuple)):
                entries = [entry for entry in argument if isinstance(entry, fx.Node)]
            else:
                continue
            found = [self._partner(anchor, entry, match) for entry in entries]
            sites = [site for site in found if site is not None]
            return sites if sites and len(sites) == len(found) else None
        return None

    def _partner(self, reader: fx.Node, argument: fx.Node, match: Match) -> str | None:
        """The site that the root of the match reads, through inner nodes of the match."""
        inner = set(match.nodes)
        while argument.name in inner:
            reader = argument
            above = next(argument_nodes(reader), None)
            if above is None:
                return None
            argument = above
        if argument.name in self._lists:
            return self._lists[argument.name][0]
        site = self._read.get((reader.name, argument.name)) or self._current.get(argument.name)
        if site is not None:
            draft = self._drafts[site]
            if match.root not in draft.readers:
                draft.readers.append(match.root)
        return site

    def _share_inputs(self, match: Match) -> bool:
        """Let inputs that share qparams use one observer; False, refused: one of two has none."""
        for port in match.ports[:-1]:
            mine = self._port_sites(match, port.name)
            others = self._port_sites(match, port.shares_with) if port.shares_with else []
            if not port.shares_with or not (mine or others):
                continue
            if not (mine and others):
                self._refuse(match, f"{port.name!r} and {port.shares_with!r} quantized alike")
                return False
            head, *rest = self._separate_from_fixed(match.anchor, match, [*others, *mine])
            for other in rest:
                self._groups.unite(head, other)
        return True

    def _port_sites(self, match: Match, name: str) -> list[str]:
        """The sites that an input of a graph pattern is read through."""
        [port] = [port for port in match.ports if port.name == name]
        pairs = ((reader, value) for reader in port.readers for value in port.values)
        return list(dict.fromkeys(self._read[pair] for pair in pairs if pair in self._read))

    def _separate_from_fixed(self, anchor: str, match: Match, partners: list[str]) -> list[str]:
        heads = {self._groups.find(name) for name in partners}
        fixed = {head for head in heads if self._source.probe(self._drafts[head].spec).fixed}
        if not fixed or len(heads) == 1:
            return partners
        again = ObserverSpec(self._rule(match), "activation")
        separate: dict[str, str] = {}
        for name in partners:
            if self._groups.find(name) in fixed and name not in separate:
                draft = self._existing(name, self._source.probe(again))
                draft = draft or self._draft(name, Role.INPUT, again)
                draft.readers += self._move_reads(match, name, draft.name) or [anchor]
                separate[name] = draft.name
        return [separate.get(name, name) for name in partners]

    def _move_reads(self, match: Match, old: str, new: str) -> list[str]:
        """The operators of a graph pattern that read site ``old``; from now on they read ``new``."""
        pairs = [(r, v) for port in match.ports for r in port.readers for v in port.values]
        moved = [pair for pair in pairs if self._read.get(pair) == old]
        self._read.update(dict.fromkeys(moved, new))
        return list(dict.fromkeys(reader for reader, _ in moved))

    def _is_arithmetic(self, match: Match) -> bool:
        """An operator whose observation depends on how many of its arguments are tensors."""
        return match.entry >= 0 and bool(
            self._entries[match.entry]._num_tensor_args_to_observation_type
        )

    def _refuse(self, match: Match, admitted: str = _FROM_INPUT) -> None:
        decision = self._plan.decisions[match.anchor]
        asked = decision.asked_activation
        self._refused.append(
            Reason(
                node=match.anchor,
                rule=ReasonCode.NOTHING_TO_SHARE,
                asked=f"output {asked.dtype}" if asked is not None else "a quantized output",
                admitted=admitted,
                fix="quantize the operator that produces its input",
                place=match.pattern,
            )
        )

    # -- for inputs and outputs --------------------------------------------------------------------

    def _draft(self, value: str, role: Role, spec: ObserverSpec) -> Draft:
        draft = Draft(next(self._names), value, role, spec)
        self._drafts[draft.name] = draft
        self._on_value.setdefault(value, []).append(draft)
        return draft

    def _probe_of(self, site: str) -> Probe:
        return self._source.probe(self._drafts[self._groups.find(site)].spec)

    def _is_no_float_tensor(self, node: fx.Node) -> bool:
        return self._dtype.get(node.name, torch.float32) is None

    def _value_dtype(self, value: str) -> torch.dtype | None:
        if value in self._drafts:
            return self._probe_of(value).dtype
        return self._dtype.get(value, torch.float32)


# Which values of a graph are observed elsewhere, or never: lists, constants, numbers.


def items(node: fx.Node) -> tuple[fx.Node, ...] | None:
    """What is read of the list of tensors that ``node`` gives, item by item; None if it is used whole.

    >>> import torch
    >>> graph = fx.Graph()
    >>> parts = graph.call_function(torch.chunk, (graph.placeholder("x"), 2))
    >>> first = graph.call_function(operator.getitem, (parts, 0))
    >>> items(parts)
    (getitem,)
    >>> joined = graph.call_function(torch.cat, (parts,))
    >>> items(parts) is None
    True
    """
    users = tuple(node.users)
    alone = all(
        user.target is operator.getitem and user.args[0] is node and isinstance(user.args[1], int)
        for user in users
    )
    return users if alone else None


def constants_left_alone(module: fx.GraphModule, backend_config: BackendConfig) -> set[str]:
    """Values without an input behind them, where the backend does not quantize constants."""
    rules = backend_config.qdq
    is_asked = rules is None or rules.quantize_constants
    return set() if is_asked else input_independent(module.graph)


def defaults_to_scalar(placeholder: fx.Node) -> bool:
    """An input such as ``scale: float = 2.0`` is a number."""
    return bool(placeholder.args) and isinstance(placeholder.args[0], (bool, int, float, str))
