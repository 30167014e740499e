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
9. Standalone and custom modules: see ``backquant.prepare.separate_interfaces``.
10. Of what gives a list (``chunk``, ``split``), each item that is read is observed, and shares the observer
    of the input. What passes the list on as a whole stays float.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from backquant.match.plan import Match, Reason
from backquant.prepare.requests import ObserverSpec
from backquant.prepare.roles import Role, argument_nodes, argument_role

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
