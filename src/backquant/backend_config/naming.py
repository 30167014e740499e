"""Readable names of operators: classes, functions, overloads, methods, literals."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

# Public modules that offer functions whose own module is private (``torch._C._nn``, ``_operator``).
_PUBLIC_MODULES = ("torch", "torch.nn.functional", "operator", "builtins", "math")


def operator_name(op: Any) -> str:
    """The shortest public dotted name under which ``op`` can be imported; a method is ``.name()``.

    >>> operator_name(torch.nn.Conv2d), operator_name(torch.add)
    ('torch.nn.Conv2d', 'torch.add')
    >>> operator_name(torch.nn.functional.max_pool2d), operator_name("view")
    ('torch.nn.functional.max_pool2d', '.view()')
    >>> operator_name(torch.ops.aten.add.Tensor), operator_name(0)
    ('torch.ops.aten.add.Tensor', '0')
    """
    if isinstance(op, str):
        return f".{op}()"
    if isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"torch.ops.{op}"
    qualified = getattr(op, "__qualname__", None) or getattr(op, "__name__", None)
    if qualified is None or not callable(op):
        return repr(op)
    module = getattr(op, "__module__", None) or ""
    for holder in [*_ancestors(module), *_PUBLIC_MODULES]:
        for name in dict.fromkeys((qualified, getattr(op, "__name__", qualified))):
            if _attribute(holder, name) is op:
                return name if holder == "builtins" else f"{holder}.{name}"
    return functional_name(op) or (f"{module}.{qualified}" if module else str(qualified))


def short_name(op: Any) -> str:
    """The last part of ``operator_name``, as used in tables where the context is clear.

    >>> short_name(torch.nn.Conv2d), short_name(torch.ops.aten.add.Tensor), short_name("view")
    ('Conv2d', 'aten.add.Tensor', '.view()')
    """
    name = operator_name(op)
    if isinstance(op, str) or not callable(op):
        return name
    if name.startswith("torch.ops."):
        return name.removeprefix("torch.ops.")
    if name.startswith(("operator.", "torch.nn.functional.")) or name.count(".") == 1:
        return name.replace("torch.nn.functional.", "F.")
    return name.rsplit(".", 1)[-1]


def operator_label(op: Any) -> str:
    """A name that is short and still tells modules, functions, and sub-packages apart.

    >>> operator_label(torch.nn.Conv2d), operator_label(torch.nn.functional.relu)
    ('nn.Conv2d', 'F.relu')
    >>> operator_label(torch.conv2d), operator_label("view"), operator_label(torch.ops.aten.mm.default)
    ('torch.conv2d', '.view()', 'aten.mm.default')
    """
    name = operator_name(op)
    for prefix, short in (
        ("torch.nn.functional.", "F."),
        ("torch.nn.", "nn."),
        ("torch.ops.", ""),
        ("backquant.nn.quantized.", ""),
        ("backquant.nn.", ""),
    ):
        if name.startswith(prefix):
            return short + name.removeprefix(prefix)
    return name


def spelled(value: Any) -> str:
    """A pattern or callable as one would write it; what has a repr of its own keeps it.

    >>> spelled((torch.nn.Conv2d, "view", 0))
    "(torch.nn.Conv2d, 'view', 0)"
    """
    if isinstance(value, tuple):
        inside = ", ".join(map(spelled, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    own_repr = isinstance(value, str) or type(value).__module__.startswith("backquant.")
    return repr(value) if own_repr else operator_name(value)


def functional_name(op: Any) -> str:
    """The name of ``op`` in ``torch.nn.functional``, found by identity; empty when not there.

    Functions chosen at call time (``boolean_dispatch``) do not carry their own name.

    >>> functional_name(torch.nn.functional.adaptive_max_pool1d)
    'torch.nn.functional.adaptive_max_pool1d'
    """
    for name, value in vars(torch.nn.functional).items():
        if value is op and not name.startswith("_"):
            return f"torch.nn.functional.{name}"
    return ""


def _ancestors(module: str) -> list[str]:
    """``a``, ``a.b``, ``a.b.c`` for ``a.b.c``, without private parts."""
    parts = module.split(".") if module else []
    prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return [p for p in prefixes if not any(part.startswith("_") for part in p.split("."))]


def _attribute(module: str, qualified: str) -> Any:
    """``module.qualified`` if it is there already; never triggers a module's ``__getattr__``."""
    value: Any = sys.modules.get(module)
    for part in qualified.split("."):
        if value is None:
            return None
        value = vars(value).get(part) if hasattr(value, "__dict__") else None
    return value


def operator_records() -> Any:
    """The room of the operators' records, which is above those that read descriptions: imported when asked.

    >>> operator_records().find("view").name
    'view'
    """
    return importlib.import_module("backquant.operators")
