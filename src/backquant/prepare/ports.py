"""Which inputs of a match are observed, in which role, and with which of them its output shares an
observer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from backquant.match.plan import Match
from backquant.prepare.roles import Role, argument_nodes, argument_role

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
