"""The aten overload by which a pass writes an operator into an exported graph, or looks for it there."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from backquant.operators.index import all_operators

#: Of operators that no record has, those whose overload is not called ``default``.
_OVERLOADS = {"slice": "Tensor", "to": "dtype", "sym_size": "int"}


@cache
def overload(name: str, which: str = "") -> Any:
    """Of the aten operator ``name``: the overload that its record lists first, or the one called ``which``.

    Raises ``AttributeError`` for a name that PyTorch does not have.

    >>> overload("add"), overload("rsqrt"), overload("conv2d", "padding")
    (<OpOverload(op='aten.add', overload='Tensor')>, <OpOverload(op='aten.rsqrt', overload='default')>, \
<OpOverload(op='aten.conv2d', overload='padding')>)
    """
    if not which and name in _first_overloads():
        return _first_overloads()[name]
    return getattr(getattr(torch.ops.aten, name), which or _OVERLOADS.get(name, "default"))


@cache
def _first_overloads() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for known in all_operators():
        for each in known.aten:
            if each.namespace == "aten":
                found.setdefault(each._opname, each)
    return found
