"""Where in the module tree a node of an exported graph comes from: ``nn_module_stack`` read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Place:
    """``call`` tells calls of one module apart; ``cls`` is the class by its import path."""

    call: str
    path: str
    cls: str


_ROOT = Place("", "", "")


def place_of(node: fx.Node) -> Place:
    """The innermost module whose ``forward`` made ``node``; the model itself where none is noted."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return _ROOT
    call, entry = list(stack.items())[-1]
    path, cls = entry[0], entry[1]
    if str(call).startswith("_empty_nn_module_stack"):
        return _ROOT
    name = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
    return Place(str(call), _clean(path), name)


def _clean(path: str) -> str:
    """``layers.0`` for ``layers.0`` and for ``L['self'].layers[0]``, as older exports have it."""
    for prefix in ("L['self']", "L__self__"):
        path = path.removeprefix(prefix)
    return path.replace("[", ".").replace("]", "").replace("'", "").strip(".")
