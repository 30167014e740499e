"""Dynamic shapes as users write them: names in place of ``torch.export.Dim``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

from backquant.errors import CaptureError

# torch's message for a dynamic size that the model's code fixes
_FIXED = re.compile(
    r"You marked (\S+) as dynamic but your code specialized it to be a constant \((\d+)\)"
)


def fixed_size(reason: str) -> tuple[str, int] | None:
    """The dynamic size that a model fixes, and to what, by torch's reason for not exporting it.

    >>> fixed_size("You marked n as dynamic but your code specialized it to be a constant (4).")
    ('n', 4)
    """
    found = _FIXED.search(reason)
    return (found[1], int(found[2])) if found else None


def as_dims(dynamic_shapes: Any) -> Any:
    """``dynamic_shapes`` with names as ``Dim`` objects, one for each name; ``"batch<=64"`` has a bound.

    >>> shapes = as_dims({"x": {0: "batch"}, "y": {0: "batch"}})
    >>> shapes["x"][0] is shapes["y"][0], shapes["x"][0].__name__
    (True, 'batch')
    """
    dims: dict[str, Any] = {}

    def converted(value: Any) -> Any:
        if isinstance(value, str):
            name, _, bound = value.partition("<=")
            return dims.setdefault(name, Dim(name, max=int(bound)) if bound else Dim(name))
        if isinstance(value, Mapping):
            return {key: converted(item) for key, item in value.items()}
        if isinstance(value, (tuple, list)):
            made = [converted(item) for item in value]
            return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
        return value

    return converted(dynamic_shapes)


def of_all_inputs(dynamic_shapes: Any, inputs: Mapping[str, Any]) -> Any:
    """``dynamic_shapes`` by name with what ``inputs`` has besides, of fixed sizes: an export asks for all.

    >>> of_all_inputs({"x": {0: "batch"}}, {"x": torch.zeros(4), "mask": None, "pair": (torch.zeros(2), 1)})
    {'x': {0: 'batch'}, 'mask': None, 'pair': (None, None)}
    """
    if not isinstance(dynamic_shapes, Mapping):
        return dynamic_shapes
    return {**dynamic_shapes} | {n: _fixed(v) for n, v in inputs.items() if n not in dynamic_shapes}


def _fixed(value: Any) -> Any:
    if is_record(value):
        return [_fixed(p) for p in pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0]]
    if pytree.tree_is_leaf(value):
        return None
    return pytree.tree_map(_fixed, value, is_leaf=lambda part: part is not value)


def is_record(value: Any) -> bool:
    """Whether it is of a class that is registered to hold tensors: an export asks for sizes of its parts."""
    kind = pytree._get_node_type(value)
    return kind in pytree.SUPPORTED_NODES and kind not in pytree.BUILTIN_TYPES


def check_dims(dynamic_shapes: Any, inputs: Mapping[str, Any]) -> None:
    """Raise CaptureError for an input, or a dimension of a tensor, that ``inputs`` (by name) have not.

    Containers of tensors are left to ``torch.export``.

    >>> check_dims({"x": {2: "length"}}, {"x": torch.zeros(4, 8)})
    Traceback (most recent call last):
    backquant.errors.CaptureError: 'x' has no dimension 2: its shape is [4, 8]
      where  dynamic_shapes['x']
      fix    the dimensions are 0 to 1: {'x': {0: 'batch'}}
    """
    if isinstance(dynamic_shapes, Mapping):
        given = dict(dynamic_shapes)
    elif isinstance(dynamic_shapes, (tuple, list)):
        given = dict(zip(inputs, dynamic_shapes, strict=False))
    else:
        return
    for name, sizes in given.items():
        if name not in inputs:
            raise CaptureError(
                f"the model has no input {name!r}",
                where=f"dynamic_shapes[{name!r}]",
                fix=f"dynamic_shapes={ {one: {0: 'batch'} for one in inputs}!r}",
            )
        if isinstance(inputs[name], torch.Tensor) and isinstance(sizes, Mapping):
            _check_dimensions(name, inputs[name], sizes)


def _check_dimensions(name: str, tensor: torch.Tensor, sizes: Mapping[Any, Any]) -> None:
    rank = tensor.dim()
    for dimension in sizes:
        if not isinstance(dimension, int) or not -rank <= dimension < rank:
            known = f"are 0 to {rank - 1}" if rank > 1 else "is 0"
            raise CaptureError(
                f"{name!r} has no dimension {dimension!r}: its shape is {list(tensor.shape)}",
                where=f"dynamic_shapes[{name!r}]",
                fix=f"the dimensions {known}: {{{name!r}: {{0: 'batch'}}}}"
                if rank
                else "leave it out",
            )
