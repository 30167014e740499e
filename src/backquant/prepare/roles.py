"""Which part an argument plays for the operator that reads it: activation, weight or bias.

Functional operators take weight and bias as arguments; the position comes from
``BackendPatternConfig._set_input_type_to_index`` of the entry for the single operator, the keyword
is ``weight`` or ``bias``. A value that is passed twice plays the first of weight, bias, activation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from torch import fx

from backquant.backend_config import BackendConfig
from backquant.graph import nodes_in
from backquant.operators import find

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
