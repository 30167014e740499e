"""Axes of free size under the user's own names, in place of the exporter's ``s77``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any


def name_axes(model: Any, dynamic_shapes: Any) -> None:
    """Rename the free sizes of an ``onnx_ir.Model``, in place, as ``dynamic_shapes`` calls them.

    Sizes that are computed from named ones (``2*s77``) are renamed, too.
    """
    names = dict(_labels(model.graph.inputs, dynamic_shapes))
    if not names:
        return
    symbols = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")
    values = [*model.graph.inputs, *model.graph.outputs]
    values += [value for node in model.graph for value in node.outputs]
    for value in values:
        if value.shape is not None:
            value.shape = _renamed(value.shape, symbols, names)


def _labels(inputs: Any, dynamic_shapes: Any) -> Iterator[tuple[str, str]]:
    """The exporter's name of each free size, and the user's."""
    if not isinstance(dynamic_shapes, Mapping):
        names = (value.name for value in inputs)
        dynamic_shapes = dict(zip(names, dynamic_shapes or (), strict=False))
    for value in inputs:
        axes = dynamic_shapes.get(value.name)
        for axis, label in axes.items() if isinstance(axes, Mapping) else ():
            name = getattr(label, "__name__", label)
            size = None if value.shape is None else getattr(value.shape[axis], "value", None)
            if isinstance(name, str) and isinstance(size, str):
                yield size, name.partition("<=")[0]


def _renamed(shape: Any, symbols: re.Pattern[str], names: Mapping[str, str]) -> Any:
    import onnx_ir as ir

    def size(dim: Any) -> Any:
        text = getattr(dim, "value", None)
        return symbols.sub(lambda m: names[m[0]], text) if isinstance(text, str) else dim

    return ir.Shape([size(dim) for dim in shape])
