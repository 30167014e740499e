"""Dynamic shapes as users write them: names in place of ``torch.export.Dim``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch.export import Dim

__all__ = ["as_dims", "fixed_size"]

# what torch says of a size that the model's code takes for a constant
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
            return type(value)(converted(item) for item in value)
        return value

    return converted(dynamic_shapes)
