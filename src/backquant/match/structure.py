"""The shape in which root getters, input getters and fusers of a backend receive nodes.

Such functions unpack nested tuples. During fusion the shape is that of the reversed pattern,
``[relu, (bn, conv)]``. During quantization PyTorch flattens the arguments of an operator that has
several: ``(add, x, (relu, conv))`` arrives as ``[add, x, relu, conv]``. The getters of a graph pattern
receive ``{name: node}``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from backquant.backend_config import BackendConfig, GraphPattern
from backquant.backend_config.pattern import NormalPattern
from backquant.errors import ConfigError
from backquant.match.matcher import Found


def nested(pattern: NormalPattern, values: tuple[Any, ...]) -> list[Any]:
    """Values in the shape of the reversed pattern; the outermost level is a list.

    >>> from torch import nn
    >>> from backquant.backend_config.pattern import normal_form
    >>> nested(normal_form((nn.Conv2d, nn.BatchNorm2d, nn.ReLU)), ("conv", "bn", "relu"))
    ['relu', ('bn', 'conv')]
    """

    def build(position: int) -> Any:
        inputs = pattern.nodes[position].inputs
        if inputs is None:
            return values[position]
        return (values[position], *map(build, inputs))

    inputs = pattern.anchor.inputs
    return [values[-1], *(map(build, inputs) if inputs is not None else ())]


def flattened(pattern: NormalPattern, values: tuple[Any, ...]) -> list[Any]:
    """Values in the shape that PyTorch gives them when it matches for quantization.

    >>> import torch
    >>> from backquant.backend_config.pattern import MatchAllNode, from_reversed
    >>> add = from_reversed((torch.add, MatchAllNode, (torch.relu, torch.nn.Conv2d)))
    >>> flattened(add, ("x", "conv", "relu", "add"))
    ['add', 'x', 'relu', 'conv']
    """

    def build(position: int) -> list[Any]:
        inputs = pattern.nodes[position].inputs
        if inputs is None:
            return [values[position]]
        below = [value for item in inputs for value in build(item)]
        if len(inputs) == 1 and len(below) > 1:
            return [values[position], tuple(below)]
        return [values[position], *below]

    return build(len(pattern.nodes) - 1)


def root_of(
    found: Found,
    backend: BackendConfig,
    shape: Callable[[NormalPattern, tuple[Any, ...]], list[Any]],
) -> fx.Node:
    """The node whose inputs are observed: the entry's own choice, or the first operator.

    The first operator is found from the anchor along the last argument that is an operator. Of a graph
    pattern it is the first module that is written, or else the first operator.

    Raises:
        ConfigError: the entry's root getter fails or returns no node of the match.
    """
    candidate = found.candidate
    getter = candidate.config._root_node_getter
    if getter is None:
        if isinstance(candidate.config.pattern, GraphPattern):
            return _named_root(candidate.config.pattern, found)
        return _default_root(candidate.pattern, found.bound)
    where = (
        f"root_node_getter of {backend.name}, entry {candidate.entry} ({candidate.pattern}), "
        f"at node {found.anchor.name!r}"
    )
    fix = "return one of the nodes that the pattern binds"
    try:
        root = getter(_named(found) or shape(candidate.pattern, found.bound))
    except Exception as error:
        raise ConfigError(
            f"the root getter raised {type(error).__name__}: {error}", where=where, fix=fix
        ) from error
    if not isinstance(root, fx.Node) or root not in found.members:
        raise ConfigError(
            f"the root getter returned {root!r}, which is no operator of the match",
            where=where,
            fix=fix,
        )
    return root


def extra_inputs_of(found: Found, backend: BackendConfig) -> tuple[fx.Node, ...]:
    """Inputs that a fused module takes beyond those of its root, in order.

    Without a getter there are none, but for a graph pattern: those that its root does not read.

    Raises:
        ConfigError: the getter fails or returns something that is no node.
    """
    candidate = found.candidate
    getter = candidate.config._extra_inputs_getter
    if getter is None:
        return other_inputs(found)
    where = (
        f"extra_inputs_getter of {backend.name}, entry {candidate.entry} ({candidate.pattern}), "
        f"at node {found.anchor.name!r}"
    )
    try:
        extra = list(getter(_named(found) or nested(candidate.pattern, found.bound)))
    except Exception as error:
        raise ConfigError(
            f"the getter raised {type(error).__name__}: {error}", where=where
        ) from error
    for value in extra:
        if not isinstance(value, fx.Node):
            raise ConfigError(f"the getter returned {value!r}, which is no node", where=where)
    return tuple(extra)


def _named(found: Found) -> dict[str, Any] | None:
    pattern = found.candidate.config.pattern
    return pattern.named(found.bound) if isinstance(pattern, GraphPattern) else None


def other_inputs(found: Found) -> tuple[Any, ...]:
    """What is bound to the inputs of a graph pattern that its root does not read, in order.

    None when the entry has a getter for them, or another kind of pattern.
    """
    config = found.candidate.config
    pattern = config.pattern
    if not isinstance(pattern, GraphPattern) or config._extra_inputs_getter is not None:
        return ()
    bound = pattern.named(found.bound)
    getter = config._root_node_getter
    root = _named_root(pattern, found) if getter is None else getter(bound)
    read = next((node.arguments for node in pattern.nodes if bound[node.name] is root), None) or ()
    return tuple(bound[name] for name in pattern.inputs if name not in read)


def _named_root(pattern: GraphPattern, found: Found) -> fx.Node:
    kinds = dict(zip(pattern.names, pattern.normal.nodes, strict=True))
    modules = [name for name in pattern.operators if kinds[name].kind == "module"]
    root: fx.Node = pattern.named(found.bound)[(modules or pattern.operators)[0]]
    return root


def _default_root(pattern: NormalPattern, values: tuple[Any, ...]) -> fx.Node:
    position = len(pattern.nodes) - 1
    while True:
        inputs = pattern.nodes[position].inputs or ()
        operators = [i for i in inputs if pattern.nodes[i].kind not in ("any", "literal")]
        operators = [i for i in operators if isinstance(values[i], fx.Node)]
        if not operators:
            root: fx.Node = values[position]
            return root
        position = operators[-1]
