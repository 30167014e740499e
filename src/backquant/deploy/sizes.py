"""Dynamic sizes that ``torch.export`` cannot prove: what it assumes of them is tried out instead.

The guard of ``MaxPool2d(2, 2, ceil_mode=True)`` on a size h, ``2*((h - 1)//2) < h``, holds for every h, and
export refuses it all the same. So the program is captured with these guards as assertions, and each is
tried on sizes at and above that of the example. One that fails there is a limit of the model, and named;
one that only small sizes break (a map shrinks to nothing) is the user's to know.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from backquant.errors import ExportError
from backquant.operators import overload

_STEPS = (1, 2, 3, 4, 7, 16, 101)


def with_inferred_ranges(dynamic_shapes: Any) -> Any:
    """``dynamic_shapes`` with dynamic axes whose least size is for ``torch.export`` to find.

    Names become ``Dim.DYNAMIC``; a bound (``"h<=64"``) stays.

    >>> with_inferred_ranges({"x": {0: "batch", 1: None}})["x"][1] is None
    True
    """
    if isinstance(dynamic_shapes, Mapping):
        return {key: with_inferred_ranges(value) for key, value in dynamic_shapes.items()}
    if isinstance(dynamic_shapes, (tuple, list)):
        made = list(map(with_inferred_ranges, dynamic_shapes))
        is_named = hasattr(dynamic_shapes, "_fields")
        return type(dynamic_shapes)(*made) if is_named else type(dynamic_shapes)(made)
    if isinstance(dynamic_shapes, str):
        bound = dynamic_shapes.partition("<=")[2]
        return Dim.DYNAMIC(max=int(bound)) if bound else Dim.DYNAMIC
    return Dim.DYNAMIC if isinstance(dynamic_shapes, Dim) else dynamic_shapes


def check_assumptions(exported: ExportedProgram, dynamic_shapes: Any) -> None:
    """Try the assertions about sizes, and take them out of the graph, in place.

    Raises ``ExportError`` for one that sizes above the example's break; names the axis and the size.
    """
    for node in list(exported.graph.nodes):
        if node.target is overload("_assert_scalar"):
            exported.graph.erase_node(node)
    exported.graph.eliminate_dead_code()
    exported.graph_module.recompile()
    axes = _axes(exported)
    environments = {id(size.node.shape_env): size.node.shape_env for _, size in axes.values()}
    for environment in environments.values():
        assumed = [a.expr for found in environment.deferred_runtime_asserts.values() for a in found]
        environment.deferred_runtime_asserts.clear()
        for expression in assumed:
            _check(expression, axes, exported.range_constraints, dynamic_shapes)


def _axes(exported: ExportedProgram) -> dict[Any, tuple[str, Any]]:
    """Name and size of the axis that each symbol is, by symbol."""
    found: dict[Any, tuple[str, Any]] = {}
    for node in exported.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        sizes: tuple[Any, ...] = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        for axis, size in enumerate(sizes):
            if isinstance(size, torch.SymInt):
                found.setdefault(size.node.expr, (f"axis {axis} of {node.name!r}", size))
    return found


def _check(
    expression: Any,
    axes: Mapping[Any, tuple[str, Any]],
    ranges: Mapping[Any, Any],
    dynamic_shapes: Any,
) -> None:
    symbols = sorted(expression.free_symbols, key=str)
    if not symbols or not all(symbol in axes for symbol in symbols):
        return
    integer = importlib.import_module("sympy").Integer
    for sizes in _samples({symbol: int(axes[symbol][1].node.hint) for symbol in symbols}):
        bounds = ((ranges.get(symbol), size) for symbol, size in sizes.items())
        if any(bound is not None and size > bound.upper for bound, size in bounds):
            continue
        tried = {symbol: integer(size) for symbol, size in sizes.items()}
        if expression.xreplace(tried) == False:  # noqa: E712 - sympy's
            named = ", ".join(f"{axes[symbol][0]} is {size}" for symbol, size in sizes.items())
            raise ExportError(
                f"the model does not take every size: it fails where {named}",
                where=f"dynamic_shapes={dynamic_shapes!r}",
                fix="leave that axis out of dynamic_shapes, or pad the input to sizes that the model takes",
            )


def _samples(example: Mapping[Any, int]) -> Iterator[dict[Any, int]]:
    """Sizes at and above the example's: one axis at a time, then all of them."""
    yield dict(example)
    for symbol, step in itertools.product(example, _STEPS):
        yield {**example, symbol: example[symbol] + step}
    for step in _STEPS:
        yield {symbol: size + step for symbol, size in example.items()}
