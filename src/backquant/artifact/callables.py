"""Functions, classes and torch constants as text, and back, within an allow-list.

Only what can be found again by its import path is written; nothing read from a file is executed
beyond importing an allowed package and looking an attribute up.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from backquant.errors import ArtifactError

__all__ = ["ALLOWED_PACKAGES", "class_path", "function_path", "resolve"]

ALLOWED_PACKAGES = ("torch", "backquant", "operator", "math", "builtins")
_BUILTINS = {"getattr", "len", "int", "float", "bool", "max", "min", "abs", "sum", "slice", "tuple"}
_TORCH_HOMES = (
    "torch",
    "torch.nn.functional",
    "torch._C._nn",
    "torch._C._special",
    "torch.special",
)


def class_path(cls: type) -> str:
    """Import path of a class.

    >>> class_path(torch.nn.Conv2d)
    'torch.nn.modules.conv.Conv2d'
    """
    return f"{cls.__module__}.{cls.__qualname__}"


def _op_path(function: Any) -> str | None:
    if isinstance(function, torch._ops.OpOverload):
        return f"torch.ops.{function}"
    if isinstance(function, torch._ops.OpOverloadPacket):
        return f"torch.ops.{function}"
    return None


def _candidates(function: Any) -> list[str]:
    name = getattr(function, "__name__", "")
    module = getattr(function, "__module__", None) or ""
    paths = [f"{module}.{getattr(function, '__qualname__', name)}"] if module else []
    if module == "_operator":
        paths.insert(0, f"operator.{name}")
    paths += [f"{home}.{name}" for home in _TORCH_HOMES]
    return paths


def function_path(function: Callable[..., Any], allow: Sequence[str] = ()) -> str:
    """Import path under which ``resolve`` finds this very function again.

    Raises ``ArtifactError`` naming a function that has none (a lambda, a closure, a user's own).

    >>> import operator
    >>> function_path(operator.add), function_path(torch.nn.functional.relu)
    ('operator.add', 'torch.nn.functional.relu')
    >>> function_path(torch.ops.aten.relu.default)
    'torch.ops.aten.relu.default'
    """
    path = _op_path(function)
    if path is not None:
        return path
    for path in _candidates(function):
        try:
            if resolve(path, allow) is function:
                return path
        except ArtifactError:
            continue
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
    raise ArtifactError(
        f"the function {name} cannot be stored: it is not found again by an import path within "
        f"{', '.join((*ALLOWED_PACKAGES, *allow))}",
        where=name,
        fix="express it with torch operators, make it part of a module that is quantized, or keep "
        "the model in memory (artifacts load without your code)",
    )


def _resolve_op(path: str) -> Any:
    target: Any = torch.ops
    for part in path.split(".")[2:]:
        try:
            target = getattr(target, part)
        except (AttributeError, RuntimeError) as error:
            raise ArtifactError(
                f"this build of torch has no operator {path}",
                where=path,
                fix="load the file with the torch version that its header names",
            ) from error
    return target


def resolve(path: str, allow: Sequence[str] = ()) -> Any:
    """The object at ``path``; refuses paths outside the allow-list.

    >>> resolve("torch.nn.functional.relu") is torch.nn.functional.relu
    True
    >>> resolve("os.system")
    Traceback (most recent call last):
    backquant.errors.ArtifactError: 'os.system' is outside of what an artifact may name
      where  os.system
      fix    backquant.load(path, allow=("os",)) if you trust the file
    """
    package = path.split(".", maxsplit=1)[0]
    if package not in (*ALLOWED_PACKAGES, *allow):
        raise ArtifactError(
            f"{path!r} is outside of what an artifact may name",
            where=path,
            fix=f'backquant.load(path, allow=("{package}",)) if you trust the file',
        )
    if package == "builtins" and path.split(".", 1)[1] not in _BUILTINS:
        raise ArtifactError(f"{path!r} is not a builtin that a graph calls", where=path)
    if path.startswith("torch.ops."):
        return _resolve_op(path)
    parts = path.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            target: Any = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for part in parts[split:]:
            target = getattr(target, part, None)
        if target is not None:
            return target
        break
    raise ArtifactError(
        f"nothing is found at {path!r}",
        where=path,
        fix="load the file with the versions of torch and backquant that its header names",
    )
