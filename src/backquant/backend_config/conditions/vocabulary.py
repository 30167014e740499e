"""Which names a condition on an entry may use: quantities, parameters of its operators, its own names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket

from backquant.backend_config.conditions.condition import (
    Condition,
    Literals,
    comparisons_in,
    quantities_of,
)
from backquant.backend_config.conditions.expressions import (
    NEIGHBOURS,
    OPERATOR,
    SUBJECTS,
    TENSOR,
    Quantity,
)
from backquant.backend_config.graph_pattern import GraphPattern
from backquant.backend_config.naming import operator_name, operator_records
from backquant.backend_config.pattern import NormalPattern
from backquant.errors import SpecError, did_you_mean

_OF_TENSOR, _NONE = frozenset(TENSOR), frozenset[str]()

#: Names that PyTorch has for one parameter, in modules, functions, methods and registered operators.
_ALIKE = (
    ("max_val", "max_value"),
    ("min_val", "min_value"),
    ("pad", "padding"),
    ("dim", "axis"),
    ("keepdim", "keepdims"),
    ("dim0", "axis0"),
    ("dim1", "axis1"),
    ("exponent", "b"),
    ("sizes", "unflattened_size"),
    ("split_size_or_sections", "split_size", "split_sizes"),
    ("indices_or_sections", "sections", "indices", "tensor_indices_or_sections"),
    ("training", "train", "use_input_stats"),
)


def names_of(parameter: str) -> tuple[str, ...]:
    """Every name of a parameter, the one that is asked for first.

    >>> names_of("split_sizes"), names_of("mode")
    (('split_sizes', 'split_size_or_sections', 'split_size'), ('mode',))
    """
    alike = next((names for names in _ALIKE if parameter in names), ())
    return (parameter, *(name for name in alike if name != parameter))


@lru_cache(maxsize=4096)
def parameters_of(op: Any) -> frozenset[str] | None:
    """The names of an operator's parameters; ``None`` if nothing tells them.

    >>> sorted(parameters_of(nn.GELU)), "align_corners" in parameters_of(nn.functional.interpolate)
    (['approximate'], True)
    """
    if isinstance(op, type):
        return _of_signature(op)
    if isinstance(op, OpOverload):
        return frozenset(argument.name for argument in op._schema.arguments)
    if not isinstance(op, str):
        found = _of_signature(op)
        if found is not None:
            return found
    return _of_packet(op if isinstance(op, str) else getattr(op, "__name__", ""))


def _of_signature(function: Any) -> frozenset[str] | None:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    return frozenset(p.name for p in parameters) - {"self", "device", "dtype"}


def _of_packet(name: str) -> frozenset[str] | None:
    packet = getattr(torch.ops.aten, name.rstrip("_"), None) if name.isidentifier() else None
    if not isinstance(packet, OpOverloadPacket):
        return None
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return frozenset(argument.name for each in overloads for argument in each._schema.arguments)


def part_names(entry: Any) -> dict[str, int]:
    """How a condition may call the operators of a pattern: name → position among its nodes.

    The names of a graph pattern; else those of the classes and functions, the first of each name.

    >>> from backquant.backend_config import BackendPatternConfig
    >>> part_names(BackendPatternConfig((nn.Conv2d, nn.ReLU)))
    {'Conv2d': 0, 'ReLU': 1}
    """
    nodes = entry.normal_pattern.nodes
    if isinstance(entry.pattern, GraphPattern):
        return {name: at for at, name in enumerate(entry.pattern.names) if name}
    found: dict[str, int] = {}
    for at, node in enumerate(nodes):
        if node.kind in ("module", "function", "method"):
            found.setdefault(_part_name(node.op), at)
    return found


@lru_cache(maxsize=4096)
def _part_name(op: Any) -> str:
    if isinstance(op, OpOverload):
        return str(op._overloadpacket.__name__)
    return operator_name(op).strip(".()").rsplit(".", 1)[-1]


def has_conditions(entry: Any) -> bool:
    """Whether an entry, or one of its dtype configs, has a condition.

    >>> from backquant.backend_config import BackendPatternConfig
    >>> has_conditions(BackendPatternConfig(nn.Conv2d).set_where({"groups": 1}))
    True
    """
    return entry.where is not None or any(
        config.where is not None for config in entry.dtype_configs
    )


def check_names(condition: Condition | None, entry: Any) -> None:
    """Raise ``SpecError`` for the first name that means nothing for the pattern of ``entry``.

    >>> from backquant.backend_config import BackendPatternConfig
    >>> from backquant.backend_config.conditions import condition_from
    >>> check_names(condition_from({"kernel_sise": 3}), BackendPatternConfig(nn.Conv2d))
    Traceback (most recent call last):
    backquant.errors.SpecError: torch.nn.Conv2d has no quantity and no parameter 'kernel_sise'
      where  kernel_sise
      fix    did you mean 'kernel_size'?
    """
    named = list(quantities_of(condition))
    if not named:
        return
    _check_neighbours(condition)
    subjects = (*SUBJECTS, *part_names(entry))
    of_operators = _parameters(entry.normal_pattern)
    for quantity in named:
        if quantity.subject and quantity.subject not in subjects:
            message = f"there is no tensor and no operator {quantity.subject!r} in this pattern"
            raise SpecError(message, where=str(quantity), fix=_advice(quantity.subject, subjects))
        of_tensor = quantity.subject in SUBJECTS
        known = _OF_TENSOR if of_tensor else _OF_TENSOR | OPERATOR.keys()
        parameters = _NONE if of_tensor else of_operators
        if parameters is None or not (known | parameters).isdisjoint(names_of(quantity.name)):
            continue
        what = quantity.subject or str(entry.normal_pattern)
        message = f"{what} has no quantity and no parameter {quantity.name!r}"
        raise SpecError(
            message, where=str(quantity), fix=_advice(quantity.name, known | parameters)
        )


def _check_neighbours(condition: Condition | None) -> None:
    """The words that name operators before and after do name some."""
    for comparison in comparisons_in(condition):
        if isinstance(comparison.left, Quantity) and comparison.left.name in NEIGHBOURS:
            values = comparison.right.values if isinstance(comparison.right, Literals) else ()
            for name in values:
                if name not in NEIGHBOURS[comparison.left.name]:
                    operator_records().named(name)


@lru_cache(maxsize=4096)
def _parameters(pattern: NormalPattern) -> frozenset[str] | None:
    """The parameters of all operators of a pattern, in every spelling of these; ``None`` if those of one are
    not known."""
    found: set[str] = set()
    for node in pattern.nodes:
        if node.kind not in ("module", "function", "method"):
            continue
        own = parameters_of(node.op)
        if own is None or _is_container(node.op):
            return None
        record = operator_records().find(node.op)
        alike = () if record is None else map(parameters_of, record.spellings)
        found |= own.union(*(each for each in alike if each is not None))
    return frozenset(found)


def _is_container(op: Any) -> bool:
    """A fused module has the parameters of its parts."""
    return isinstance(op, type) and issubclass(op, nn.Sequential)


def _advice(word: str, known: Iterable[str]) -> str:
    names = sorted(known)
    return did_you_mean(word, names, f"known: {', '.join(names)}")
