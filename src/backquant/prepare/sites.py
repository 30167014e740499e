"""Observation sites: which values are observed, by what, and who shares. Data; nothing is edited.

Rules (PyTorch's, with the differences that are marked)

1. Inputs of a quantized match are those of its root; its output is that of its anchor.
2. An input is observed when the dtype of the value differs from the dtype asked. A value has the
   dtype of its observer; without one it is float32.
   *Different:* PyTorch gives a value the dtype that its producer's QConfig asks for even where no
   observer stands (an output whose sharing failed, a dynamically quantized operator), and so leaves
   the consumer's input unobserved: ``linear(x.reshape(...))`` loses its integer kernel.
3. An observer of the same type and dtype on the same value is used again.
4. Dynamic quantization observes the zeroth positional argument only, and no output.
   *Different:* arithmetic on several activations (``matmul``, ``add``), for which PyTorch's backends have no
   dynamic dtype config, has all of them quantized.
5. Outputs of operators that share the observer with their input join the group of their first
   argument (and of the other entries, if that is a list). A group uses the observer of its head.
   *Different:* groups are joined as a whole. PyTorch replaces the observer at single places, so that
   a pool whose input is also an entry of a cat ends with two sets of qparams.
6. If an argument has no observer to share, the output's is dropped and the match stays float.
   *Different:* PyTorch then searches up the graph through any operator, and may adopt the observer of
   an unrelated value (``conv -> sin -> reshape``: the sine would get the convolution's scale).
7. Fixed qparams hold for the operator's output and for what only rearranges it.
   *Different, three times:* in PyTorch the entries of ``cat([sigmoid(x), y])`` all get the sigmoid's
   [0, 1); here the fixed value is observed once more. ``sigmoid(x) * 2`` is clipped to [0, 1), too;
   here arithmetic on a fixed range observes its result. And an input of ``sigmoid`` that needs an
   observer gets one of [0, 1); here it is measured.
8. Values that are no float tensors (shapes, indices, masks; *different:* inputs whose default is a
   number) are never observed; neither are inputs
   and outputs of ``INPUT_OUTPUT_NOT_OBSERVED`` entries.
9. Standalone and custom modules: see ``backquant.prepare.standalone``.
10. Of what gives a list (``chunk``, ``split``), each item that is read is observed, and shares the observer
    of the input. What passes the list on as a whole stays float.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import fx, nn

from backquant.backend_config import BackendConfig, LeaveFloat
from backquant.dtypes import find_dtype
from backquant.errors import ConfigError
from backquant.graph import GraphIndex, nodes_in
from backquant.match.plan import Match, Plan, Reason, RuleRef
from backquant.match.refusal import entry_text
from backquant.match.rules import QConfigReader
from backquant.match.scale_rules import float_results, only_moves
from backquant.match.verdict import QConfigRequest
from backquant.observe import (
    HistogramObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)
from backquant.observe.protocol import (
    ObserverPartial,
    is_fake_quantize,
    is_fixed_qparams,
    is_observer_or_fake_quantize,
    is_reuse_input,
    lacks_of_observer,
)
from backquant.operators import find
from backquant.qconfig import QConfig, QConfigMapping

# The observer for one tensor: the rule that asks for it, and the module that it makes.
#
# A spec is data (it travels with the prepared model); ``ObserverSource`` turns it into modules. Each spec
# is probed once: one throw-away observer tells type, dtype and kind.


# Observers whose only state is a range that can be reset.
_FORGETFUL = (MinMaxObserver, PerChannelMinMaxObserver)
# Observers that hold only settings and buffers: copying one is faster than calling the factory again.
_COPIED = (*_FORGETFUL, HistogramObserver)
_TABLES = frozenset({dict, OrderedDict, list, set})


@dataclass(frozen=True)
class ObserverSpec:
    """Where an observer comes from.

    ``part`` is ``activation``, ``weight`` or ``output`` of the rule's QConfig; ``bias``;
    ``output_overwrite`` of the backend's entry ``entry``; or ``input_of_fixed``: see ``ObserverSource``.
    """

    rule: RuleRef | None
    part: str
    entry: int = -1


@dataclass(frozen=True)
class Probe:
    """What a spec makes. ``kind`` is None when nothing is observed."""

    kind: type | None = None
    dtype: torch.dtype | None = None
    is_dynamic: bool = False
    reuses_input: bool = False
    fixed: bool = False

    @property
    def observable(self) -> bool:
        """Whether tensors of this dtype get an observer in the graph (float32 does not).

        *Different:* bfloat16 does. PyTorch leaves it out, and so the model as it is.
        """
        return is_observed(self.dtype)


class ObserverSource:
    """Makes observers and fake-quantizers for specs.

    The input of an operator with fixed qparams (sigmoid) is not in the range of its output. When
    such an input needs an observer, PyTorch inserts one with the output's qparams, which clips the
    input to [0, 1]. Here the part ``input_of_fixed`` takes the mapping's global activation if it has
    the same dtype and measures, else a min/max observer of that dtype.

    >>> from backquant.match.plan import RuleKind
    >>> ask = QConfig(MinMaxObserver, MinMaxObserver.with_args(dtype=torch.qint8))
    >>> source = ObserverSource(BackendConfig("b"), QConfigMapping().set_global(ask))
    >>> spec = ObserverSpec(RuleRef(RuleKind.GLOBAL, 0, ""), "weight")
    >>> source.probe(spec).dtype, type(source.make(spec)).__name__
    (torch.qint8, 'MinMaxObserver')
    """

    def __init__(self, backend_config: BackendConfig, qconfig_mapping: QConfigMapping) -> None:
        self._entries = backend_config.shared_configs
        self._mapping = qconfig_mapping
        self._qconfigs: dict[RuleRef, QConfig | None] = {}
        self._factories: dict[ObserverSpec, Callable[[], Any] | None] = {}
        self._probes: dict[ObserverSpec, Probe] = {}
        self._reused: dict[ObserverSpec, Any] = {}
        self._fresh: dict[ObserverSpec, nn.Module] = {}

    def qconfig(self, rule: RuleRef | None) -> QConfig | None:
        """The QConfig that ``rule`` gives, or None when no rule applied."""
        if rule is None:
            return None
        if rule not in self._qconfigs:
            self._qconfigs[rule] = self._mapping.lookup(rule.kind, rule.index)
        return self._qconfigs[rule]

    def probe(self, spec: ObserverSpec) -> Probe:
        """What ``spec`` makes. Raises ConfigError when the factory makes no observer."""
        if spec not in self._probes:
            made = self._make_checked(spec)
            self._probes[spec] = Probe() if made is None else _probe(made)
        return self._probes[spec]

    def make(self, spec: ObserverSpec) -> nn.Module:
        """A fresh observer. Raises ConfigError when the spec asks for none."""
        if spec in self._fresh:
            return _twin(self._fresh[spec])
        made = self._make_checked(spec)
        if made is None:
            raise ConfigError(
                "an observer was asked for where the QConfig has none",
                where=f"{spec.rule}: {spec.part}",
                fix=f"QConfig({spec.part}=MinMaxObserver, ...)",
            )
        factory = self._factories[spec]
        plain = isinstance(factory, ObserverPartial) and not factory.callable_args
        if plain and type(made) in _COPIED:  # with callable arguments each observer may differ
            self._fresh[spec] = _twin(made)
        return made

    def reused(self, spec: ObserverSpec) -> nn.Module:
        """An observer without measurements, for one tensor; the next call resets and returns the same module.

        Raises ConfigError when the spec asks for none.
        """
        known = self._reused.get(spec)
        if known is None:
            known = self._reused[spec] = self.make(spec)
        elif type(known) in _FORGETFUL:
            known.reset_min_max_vals()
        else:
            known = self.make(spec)
        return known

    def _make_checked(self, spec: ObserverSpec) -> nn.Module | None:
        if spec not in self._factories:
            self._factories[spec] = self._factory(spec)
        factory = self._factories[spec]
        if factory is None:
            return None
        made: nn.Module = factory()
        if not is_observer_or_fake_quantize(made):
            raise ConfigError(
                f"the {spec.part} makes a {type(made).__name__}, which is neither an observer nor "
                f"a fake-quantizer: {lacks_of_observer(made)}",
                where=self._place(spec),
                fix="its class needs an attribute dtype, forward(x) -> x, and "
                "calculate_qparams() -> (scale, zero_point)",
            )
        return made

    def _place(self, spec: ObserverSpec) -> str:
        if spec.entry < 0:
            return f"QConfigMapping: {spec.rule}"
        return f"backend, entry {spec.entry} ({entry_text(self._entries[spec.entry])})"

    def _factory(self, spec: ObserverSpec) -> Callable[[], Any] | None:
        qconfig = self.qconfig(spec.rule)
        if qconfig is None:
            return None
        if spec.part == "output_overwrite":
            return self._overwrite(spec.entry, qconfig)
        if spec.part == "bias":
            reader = QConfigReader()
            requests = (
                read(qconfig, self._place(spec)) for read in (reader.activation, reader.weight)
            )
            return PlaceholderObserver.with_args(dtype=QConfigRequest(*requests).bias_dtype)
        if spec.part == "input_of_fixed":
            return self._measuring(qconfig)
        factory: Callable[[], Any] | None = getattr(qconfig, spec.part)
        return factory

    def _overwrite(self, entry: int, qconfig: QConfig) -> Callable[[], Any] | None:
        config = self._entries[entry]
        trains = is_fake_quantize(qconfig.activation())
        overwrite = (
            config._overwrite_output_fake_quantize if trains else config._overwrite_output_observer
        )
        return overwrite if overwrite is not None else qconfig.activation

    def _measuring(self, qconfig: QConfig) -> Callable[[], Any]:
        wanted = _probe(qconfig.activation()).dtype
        general: QConfig | None = self._mapping.global_qconfig
        if general is not None and general.activation is not None:
            probe = _probe(general.activation())
            if probe.dtype == wanted and not (probe.fixed or probe.reuses_input):
                return general.activation  # type: ignore[no-any-return]
        return MinMaxObserver.with_args(dtype=wanted)


def is_observed(dtype: torch.dtype | None) -> bool:
    """Whether activations of this dtype get an observer in the graph.

    >>> is_observed(torch.uint16), is_observed(torch.quint4x2), is_observed(torch.float32)
    (True, False, False)
    """
    row = find_dtype(dtype)
    return row is not None and row.is_observed


def _twin(observer: nn.Module) -> nn.Module:
    """A copy of an observer that holds nothing but settings, buffers and tables without modules."""
    made: nn.Module = object.__new__(type(observer))
    own = made.__dict__
    for name, value in observer.__dict__.items():
        own[name] = value.copy() if type(value) in _TABLES else value
    buffers = observer._buffers.items()
    own["_buffers"] = {name: None if b is None else b.detach().clone() for name, b in buffers}
    return made


def _probe(observer: Any) -> Probe:
    return Probe(
        kind=type(observer),
        dtype=getattr(observer, "dtype", None),
        is_dynamic=bool(getattr(observer, "is_dynamic", False)),
        reuses_input=is_reuse_input(observer),
        fixed=is_fixed_qparams(observer),
    )


# Which part an argument plays for the operator that reads it: activation, weight or bias.
#
# Functional operators take weight and bias as arguments; the position comes from
# ``BackendPatternConfig._set_input_type_to_index`` of the entry for the single operator, the keyword is
# ``weight`` or ``bias``. A value that is passed twice plays the first of weight, bias, activation.


# Operators whose weight no kernel quantizes.
_WEIGHT_STAYS_FLOAT = "norm"


class Role(str, Enum):
    """The part that an observed tensor plays."""

    INPUT = "input"
    WEIGHT = "weight"
    BIAS = "bias"
    OUTPUT = "output"
    QUANTIZED_INPUT = "quantized input"  # an input of the model that arrives quantized
    NONE = "none"  # a weight that is never quantized; indices and masks


def input_positions(backend_config: BackendConfig) -> dict[Any, dict[str, int]]:
    """Positions of weight and bias per function: ``{F.linear: {"weight": 1, "bias": 2}, ...}``.

    >>> import torch.nn.functional as F
    >>> from backquant.backend_config import BackendPatternConfig
    >>> entry = BackendPatternConfig(F.linear)._set_input_type_to_index({"weight": 1, "bias": 2})
    >>> input_positions(BackendConfig("b").set_backend_pattern_config(entry))[F.linear]
    {'weight': 1, 'bias': 2}
    """
    return backend_config.derived(input_positions, _input_positions)


def _input_positions(backend: BackendConfig) -> dict[Any, dict[str, int]]:
    positions: dict[Any, dict[str, int]] = {}
    for entry in backend.shared_configs:
        pattern = entry.normal_pattern
        if pattern.size == 1 and entry._input_type_to_index:
            positions[pattern.anchor.op] = dict(entry._input_type_to_index)
    return positions


def argument_role(
    node: fx.Node, argument: fx.Node, positions: Mapping[Any, Mapping[str, int]]
) -> Role:
    """The part that ``argument`` plays for ``node``.

    >>> import torch.nn.functional as F
    >>> graph = fx.Graph()
    >>> x, w = graph.placeholder("x"), graph.placeholder("w")
    >>> call = graph.call_function(F.linear, (x, w))
    >>> argument_role(call, w, {F.linear: {"weight": 1}}).value
    'weight'
    """
    places = positions.get(node.target, {}) if node.op == "call_function" else {}
    for role in (Role.WEIGHT, Role.BIAS):
        index = places.get(role.value)
        by_position = index is not None and index < len(node.args) and node.args[index] is argument
        if by_position or node.kwargs.get(role.value) is argument:
            stays = role is Role.WEIGHT and _stays_float(node, argument)
            return Role.NONE if stays else role
    return Role.NONE if _stays_float(node, argument) else Role.INPUT


def _stays_float(node: fx.Node, argument: fx.Node) -> bool:
    """Whether ``argument`` is a place in another tensor, or the weight of a normalization."""
    known = find(node.target) if node.op == "call_function" else None
    if known is None:
        return False
    is_norm = known.family == _WEIGHT_STAYS_FLOAT
    if is_norm and node.kwargs.get("weight") is argument:
        return True
    places = (known.weight_index,) if is_norm else known.places
    return any(
        place is not None and place < len(node.args) and node.args[place] is argument
        for place in places
    )


def argument_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that ``node`` reads, in the order of its arguments, nested lists included.

    Dicts and slices are not entered: no operator takes tensors in them.

    >>> import torch
    >>> graph = fx.Graph()
    >>> x, y = graph.placeholder("x"), graph.placeholder("y")
    >>> [n.name for n in argument_nodes(graph.call_function(torch.cat, ([x, y], 1)))]
    ['x', 'y']
    """
    for argument in (*node.args, *node.kwargs.values()):
        yield from nodes_in(argument)


#: Observers are modules and nodes named ``activation_post_process_0``, ``_1``, … as in PyTorch.
PREFIX = "activation_post_process_"
#: Observers of model inputs that arrive quantized; PyTorch inserts none.
QUANTIZED_INPUT = "quantized_input_"


@dataclass(frozen=True)
class Site:
    """One observed value.

    ``value`` is a node of the unobserved graph, or the name of another site (a value that is needed
    in two dtypes). ``readers`` are the quantized root nodes that read it as an input; an output site
    is also read by everything else that used the value. ``producer`` is the anchor whose output it
    is, for outputs. ``group`` is the site whose observer it uses: its own name unless it shares.
    """

    name: str
    value: str
    role: Role
    spec: ObserverSpec
    readers: tuple[str, ...] = ()
    producer: str = ""
    group: str = ""

    @property
    def shared(self) -> bool:
        """Whether the observer is that of another site."""
        return self.group != self.name


@dataclass
class Draft:
    """A site in the making."""

    name: str
    value: str
    role: Role
    spec: ObserverSpec
    producer: str = ""
    readers: list[str] = field(default_factory=list)

    def finished(self, group: str) -> Site:
        """The site, which uses the observer of ``group``."""
        return Site(
            name=self.name,
            value=self.value,
            role=self.role,
            spec=self.spec,
            readers=tuple(self.readers),
            producer=self.producer,
            group=group,
        )


@dataclass(frozen=True)
class SiteTable:
    """All sites in the order of insertion; ``refused`` has the matches of rule 6."""

    sites: tuple[Site, ...] = ()
    refused: tuple[Reason, ...] = ()
    _by_name: dict[str, Site] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._by_name.update({site.name: site for site in self.sites})

    def __getitem__(self, name: str) -> Site:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def groups(self) -> dict[str, tuple[str, ...]]:
        """Members of each group by its head, in order."""
        members: dict[str, list[str]] = {}
        for site in self.sites:
            members.setdefault(site.group, []).append(site.name)
        return {head: tuple(names) for head, names in members.items()}


# Which inputs of a match are observed, in which role, and with which of them its output shares an
# observer.

_ROLES = {"activation": Role.INPUT, "weight": Role.WEIGHT, "bias": Role.BIAS, "float": Role.NONE}
_ORDER = (Role.WEIGHT, Role.BIAS, Role.INPUT, Role.NONE)


def observed_arguments(
    reader: fx.Node, match: Match, positions: Mapping[Any, Mapping[str, int]]
) -> Iterator[tuple[fx.Node, Role]]:
    """The arguments of ``reader``, an operator of ``match``, that are observed, with their roles.

    An operator whose arguments a graph pattern lists: those that are ports, by the roles of the ports;
    of a value that is bound to several, the first of weight, bias, activation. Any other: all
    arguments from outside of the match, by their positions.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> call = graph.call_method("relu", (x,))
    >>> [role.value for _, role in observed_arguments(call, Match(0, "", ("relu",), "relu"), {})]
    ['input']
    """
    is_open = not match.ports or reader.name in match.open_readers
    for argument in argument_nodes(reader):
        if is_open:
            inside = bool(match.ports) and argument.name in match.nodes
            role = Role.NONE if inside else argument_role(reader, argument, positions)
        else:
            role = _port_role(reader, argument, match)
        if role is not Role.NONE:
            yield argument, role


def _port_role(reader: fx.Node, argument: fx.Node, match: Match) -> Role:
    found = {
        _ROLES[port.role]
        for port in match.ports
        if reader.name in port.readers and argument.name in port.values
    }
    return min(found, key=_ORDER.index, default=Role.NONE)


def shared_port(match: Match, *, shares: bool) -> str:
    """The port of a graph pattern whose observer the output shares; empty if the output has its own.

    ``shares``: the entry or the request wants the output to share the input's, that is the first
    activation's.

    >>> from backquant.match.plan import PortUse
    >>> ports = (PortUse("x", ("x",), ("relu",), "activation"), PortUse("y", ("relu",), (), "activation"))
    >>> shared_port(Match(0, "", ("relu",), "relu", ports=ports), shares=True)
    'x'
    """
    if match.ports[-1].shares_with or not shares:
        return match.ports[-1].shares_with
    inputs = (port for port in match.ports[:-1] if port.role == "activation" and port.values)
    return next((port.name for port in inputs), "")


# Which observed values are needed quantized: those that a quantized operator reads, and results that no
# rule leaves in float (``LeaveFloat``, ``results``).
#
# In calibration every result is observed, and conversion leaves out what is not needed. In training what is
# not needed is not rounded either, so that training computes what the converted model will.


def needed_names(
    sites: Sequence[Site],
    quantized: Callable[[str], bool],
    moves: Callable[[str], bool],
    floats: Collection[str],
    given: Collection[str] = (),
) -> frozenset[str]:
    """Names of the sites that are needed. What only moves values to float operators then moves floats.

    Args:
        sites: in graph order.
        quantized, moves: whether the operator of this name is, and whether it only moves its one input.
        floats: operators whose results stay float where no quantized operator reads them.
        given: names of sites that are needed in any case.
    """
    needed, moving = set[str](), set[str]()
    for site in reversed(sites):
        made = site.producer if site.producer and quantized(site.producer) else ""
        is_read = any(quantized(reader) and reader not in moving for reader in site.readers)
        if is_read or (made and site.name in given):
            needed.add(site.name)
        elif made and floats and moves(made):
            moving.add(made)
        elif made and made not in floats:
            needed.add(site.name)
    return frozenset(needed)


def without_float_results(
    table: SiteTable,
    module: fx.GraphModule,
    plan: Plan,
    backend: BackendConfig,
    by_default: Iterable[LeaveFloat],
) -> SiteTable:
    """``table`` without the results that stay float by the backend's ``qdq``, or, where the model does not
    return them, ``by_default``."""
    graph = GraphIndex(module)
    always = float_results(
        plan, graph, backend, () if backend.qdq is None else backend.qdq.leave_float
    )
    floats = always | float_results(plan, graph, backend, by_default)
    if not floats:
        return table
    given = [s.name for s in table.sites if s.producer not in always and _is_returned(graph, s)]
    needed = needed_names(
        table.sites,
        lambda name: name in plan.decisions and plan.decisions[name].quantized,
        lambda name: only_moves(graph, graph.nodes[name]),
        floats,
        given,
    )
    kept = set(needed)
    for site in reversed(table.sites):  # an observer of another dtype stands behind the first
        if site.name in kept:
            kept.update((site.group, site.value))
    return SiteTable(tuple(site for site in table.sites if site.name in kept), table.refused)


def _is_returned(graph: GraphIndex, site: Site) -> bool:
    """Whether the model returns the value, maybe moved by operators that nothing observes."""
    pending = list(graph.nodes[site.value].users) if site.value in graph.nodes else []
    while pending:
        user = pending.pop()
        if user.op == "output":
            return True
        if only_moves(graph, user):
            pending += user.users
    return False
