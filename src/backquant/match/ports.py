"""The named inputs and the output of a graph pattern in one occurrence."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from backquant.backend_config import GraphPattern, Port
from backquant.graph import GraphIndex, nodes_in
from backquant.match.matcher import Found
from backquant.match.plan import PortUse


def port_uses(found: Found) -> tuple[PortUse, ...]:
    """Inputs, then the output; none for patterns that have no names.

    >>> import torch
    >>> from backquant.backend_config import BackendConfig, BackendPatternConfig
    >>> from backquant.graph import GraphIndex, nodes_in
    >>> from backquant.match.index import PatternIndex
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
    first = module[0] if isinstance(module, nn.Sequential) and len(module) else module
    return type_before_parametrizations(first)


def _readers(found: Found, name: str) -> Iterator[str]:
    pattern = found.candidate.config.pattern
    assert isinstance(pattern, GraphPattern)
    position = pattern.names.index(name)
    for part, value in zip(found.candidate.pattern.nodes, found.bound, strict=True):
        if position in (part.inputs or ()):
            yield value.name
