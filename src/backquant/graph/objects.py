"""Objects of classes that ``torch.export`` does not know, as arguments and as outputs of a model.

A model may take and return instances of any class: the caches of keys and values that decoders return,
dataclasses, records of an own library. ``torch.export`` takes tensors apart from tuples, lists, dicts and
classes that are registered with ``torch.utils._pytree`` only. While a model is exported, the classes of
the objects in its arguments and in what it returns are registered, too, unless somebody did: an object's
parts are those attributes that hold tensors or sizes. All its other attributes are kept as they are.
"""

from __future__ import annotations

import copy
import enum
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from backquant.errors import InputError

_CONTAINERS = (list, tuple, dict, set, frozenset)
_NO_RECORDS = (
    *(bool, int, float, complex, str, bytes, type(None), type, enum.Enum),
    *(torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, nn.Module, torch.Generator),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
)


@dataclass(frozen=True)
class Shell:
    """An object without its parts: its class, the names of the parts, the other attributes.

    Two are equal when class and names are: the rest is not compared.
    """

    cls: type
    names: tuple[str, ...]
    rest: dict[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, value: Any) -> tuple[list[Any], Shell]:
        """The parts of ``value``, and what is left of it.

        >>> value = types.SimpleNamespace(scores=torch.ones(1), name="x")
        >>> Shell.of(value)
        ([tensor([1.])], Shell(cls=<class 'types.SimpleNamespace'>, names=('scores',), rest={'name': 'x'}))
        """
        held = attributes(value)
        names = tuple(name for name, part in held.items() if _holds(part, set()))
        rest = {name: part for name, part in held.items() if name not in names}
        return [held[name] for name in names], cls(type(value), names, rest)

    def filled(self, parts: Iterable[Any]) -> Any:
        """An object with these parts.

        >>> Shell(types.SimpleNamespace, ("scores",), {"name": "x"}).filled([3])
        namespace(name='x', scores=3)
        """
        kind: Any = self.cls
        made = kind.__new__(kind)
        # containers are the object's own; what is in them is shared
        rest = {n: copy.copy(v) if isinstance(v, _CONTAINERS) else v for n, v in self.rest.items()}
        for name, value in (*rest.items(), *zip(self.names, parts, strict=True)):
            object.__setattr__(made, name, value)
        return made


def attributes(value: Any) -> dict[str, Any]:
    """What an object itself holds, by name: no methods, nothing of its class.

    >>> attributes(types.SimpleNamespace(a=1))
    {'a': 1}
    """
    kind: Any = type(value)
    slots = _slots(kind)
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)} if slots else {}
    return found | getattr(value, "__dict__", {})


@lru_cache(maxsize=128)
def _slots(kind: type) -> tuple[str, ...]:
    found: list[str] = []
    for parent in kind.__mro__:
        names = parent.__dict__.get("__slots__", ())
        found += (names,) if isinstance(names, str) else names
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _holds(value: Any, seen: set[int]) -> bool:
    """Whether there is a tensor or a size in ``value``."""
    if isinstance(value, (torch.Tensor, torch.SymInt)):
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    return any(_holds(part, seen) for part in _inside(value))


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    return attributes(value).values() if is_object(value) else ()


def is_object(value: Any) -> bool:
    """Whether a value is neither a container nor an atom.

    >>> is_object(types.SimpleNamespace()), is_object([1]), is_object("a")
    (True, False, False)
    """
    return not isinstance(value, (*_CONTAINERS, *_NO_RECORDS))


def object_classes(value: Any) -> set[type]:
    """Classes of the objects in ``value`` that nobody has registered.

    >>> object_classes([torch.ones(1), {"a": types.SimpleNamespace(b=torch.ones(1), c="d")}])
    {<class 'types.SimpleNamespace'>}
    """
    seen: set[int] = set()
    found: set[type] = set()
    remaining = pytree.tree_leaves(value)
    while remaining:
        leaf = remaining.pop()
        if is_object(leaf) and id(leaf) not in seen:
            seen.add(id(leaf))
            found.add(type(leaf))
            remaining += pytree.tree_leaves(Shell.of(leaf)[0])
    return found


def field_index(value: Any, name: Any) -> int | None:
    """Where the field ``name`` stands in a named tuple; ``None`` for any other value and name.

    >>> from collections import namedtuple
    >>> field_index(namedtuple("State", "h c")(1, 2), "c"), field_index((1, 2), "c")
    (1, None)
    """
    fields = getattr(type(value), "_fields", ())
    return fields.index(name) if isinstance(value, tuple) and name in fields else None


def part(value: Any, name: str) -> Any:
    """The attribute ``name`` that ``value`` itself holds: no method, no property, nothing of its class.

    A graph that is read from a file takes objects among its arguments apart with it. Raises ``InputError``.

    >>> part(types.SimpleNamespace(keys=1), "keys")
    1
    """
    index = field_index(value, name)
    if index is not None:
        return value[index]
    held = attributes(value) if is_object(value) else {}
    if name not in held:
        raise InputError(
            f"an argument of class {type(value).__name__} has no data called {name!r}",
            where=name,
            fix="pass an object of the class that the example inputs had, with as many tensors",
        )
    return held[name]


def fresh(value: Any, above: tuple[Any, ...] = ()) -> Any:
    """``value`` with objects of its own, which a model may change, and the same tensors.
    Raises ``InputError`` for an object that holds itself (``above``: those that ``value`` is in).

    >>> cache = types.SimpleNamespace(keys=[torch.ones(1)])
    >>> copied = fresh((cache, 2))
    >>> copied[0] is cache, copied[0].keys is cache.keys, copied[0].keys[0] is cache.keys[0]
    (False, False, True)
    """

    def renewed(leaf: Any) -> Any:
        if not is_object(leaf):
            return leaf
        parts, shell = _taken_apart(leaf, above)
        return shell.filled(fresh(parts, (*above, leaf))) if parts else leaf

    return pytree.tree_map(renewed, value)


def _taken_apart(value: Any, above: tuple[Any, ...]) -> tuple[list[Any], Shell]:
    if any(value is other for other in above):
        raise InputError(
            f"an object of class {type(value).__name__} holds itself, which no graph can take apart",
            where=f"{type(value).__name__}: {', '.join(attributes(value))}",
            fix="pass an object without the reference back to it",
        )
    return Shell.of(value)


def tensors_of(value: Any, above: tuple[Any, ...] = ()) -> list[torch.Tensor]:
    """The tensors in ``value``, in the order in which an export has them.
    Raises ``InputError`` for an object that holds itself (``above``: those that ``value`` is in).

    >>> tensors_of({"a": types.SimpleNamespace(b=[torch.ones(1)]), "c": 2})
    [tensor([1.])]
    """
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif is_object(leaf):
            found += tensors_of(_taken_apart(leaf, above)[0], (*above, leaf))
    return found


@contextmanager
def known_to_export(classes: Iterable[type]) -> Iterator[None]:
    """Register ``classes`` with ``torch.utils._pytree`` while the context lasts.

    >>> with known_to_export({types.SimpleNamespace}):
    ...     pytree.tree_leaves(types.SimpleNamespace(a=1, b=torch.ones(1)))
    [tensor([1.])]
    """
    registered: list[type] = []
    try:
        for number, cls in enumerate(classes):
            pytree._private_register_pytree_node(
                cls,
                Shell.of,
                lambda parts, shell: shell.filled(parts),
                serialized_type_name=f"backquant.{cls.__module__}.{cls.__qualname__}.{number}",
                flatten_with_keys_fn=_with_keys,
            )
            registered.append(cls)
        yield
    finally:
        for cls in registered:
            pytree._deregister_pytree_node(cls)


def _with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Shell]:
    parts, shell = Shell.of(value)
    return [(pytree.GetAttrKey(n), part) for n, part in zip(shell.names, parts, strict=True)], shell
