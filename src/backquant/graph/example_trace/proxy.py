"""Values of a trace that answer what Python asks of them, as the value on the example inputs would."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx

from backquant.graph.in_place import Changeable, put

_OF_AUTOGRAD = tuple(str(Path(torch.__file__).parent / name) for name in ("autograd", "_functorch"))
# In the code, or on the line, that asks for the class of a value.
_OF_CLASSES = ("isinstance", "issubclass", "__class__")


class ExampleProxy(Changeable):
    """A value that is recorded, and known on the example inputs, where it can be.

    1. ``isinstance`` in Python sees the class of the value. Torch's functions in C do not: they would read
       memory of a tensor that is not there (``torch.as_tensor(x)``).
    2. What must be a number, a truth or a length to Python is that of the example; the tracer notes it, and
       the graph checks it at each call.
    3. What is computed from sizes stays computed.
    4. ``callable`` is true of it, as of all values of a trace: a tensor that is called is itself
       (``x() if callable(x) else x``).
    """

    tracer: Any  # an ``ExampleTracer``, which makes these

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # rule 1
        if not _asks_for_class(sys._getframe(1)):
            return type(self)
        return self.tracer.class_of(self._value()) or type(self)

    def _value(self) -> Any:
        return self.tracer.values.of(self.node)

    def __getattr__(self, name: str) -> Any:
        return self.tracer.attribute(self, name)

    def __bool__(self) -> bool:
        return self.tracer.truth(self, sys._getframe(1))

    def __len__(self) -> int:
        return self.tracer.length(self)

    def __iter__(self) -> Iterator[Any]:
        return self.tracer.items(self)

    def keys(self) -> Any:
        return self.tracer.called_method(self, "keys", (), {})

    def __contains__(self, item: Any) -> bool:
        return self.tracer.contains(self, item)

    def __int__(self) -> int:
        return int(self.tracer.number(self))

    def __float__(self) -> float:
        return float(self.tracer.number(self))

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.tracer.number(self), digits)

    def __index__(self) -> int:
        return self.tracer.index(self, _position(sys._getframe(1)))

    def __hash__(self) -> int:
        return self.tracer.hash_of(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._value(), torch.Tensor):  # rule 4
            return self
        return super().__call__(*args, **kwargs)

    def __setitem__(self, index: Any, value: Any) -> None:
        x: Any = self  # to PyTorch's functions a tensor
        places = torch.arange(x.numel(), device=x.device).reshape(x.shape)[index]
        if isinstance(value, (bool, int, float)):
            given = torch.full_like(places, value, dtype=x.dtype)
        else:
            given = value.to(x.dtype).expand_as(places)
        made = self.tracer.create_proxy("call_function", put, (self, places, given), {})
        self.tracer.changed.add(made.node)

    @classmethod
    def __torch_function__(
        cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None
    ) -> Any:
        """Torch's functions ask for ``__index__`` before they find that an argument is recorded."""
        given = (*(args or ()), *(kwargs or {}).values())
        for tracer in {each.tracer for each in proxies_in(given)}:
            tracer.not_indexed(_position(sys._getframe(1)))
        return super().__torch_function__(orig_method, types, args, kwargs)


class ExampleAttribute(ExampleProxy):
    """An attribute that is not read yet: mostly it is a method, and called."""

    def __init__(self, root: ExampleProxy, name: str, value: Any) -> None:
        self.root = root
        self.attr = name
        self.tracer = root.tracer
        self._found = value
        self._node: fx.Node | None = None

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        if self._node is None:
            self._node = self.tracer.read(self.root, self.attr)
        return self._node

    def _value(self) -> Any:
        return self._found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._found, torch.Tensor):  # rule 4
            return self
        return self.tracer.called_method(self.root, self.attr, args, kwargs)


def _asks_for_class(frame: FrameType) -> bool:
    """Whether the Python code at ``frame`` itself asks for a class, as far as its line shows; code without
    lines (type checks that a decorator wrote) does where it may; autograd's passes values on to C."""
    if frame.f_code.co_filename.startswith(_OF_AUTOGRAD):
        return False
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    if not line:
        return any(word in frame.f_code.co_names for word in _OF_CLASSES)
    return any(word in line for word in (*_OF_CLASSES, "case "))


def _position(frame: FrameType) -> tuple[FrameType, int]:
    """Which call a frame is at."""
    return frame, frame.f_lasti


def proxies_in(values: Any) -> list[ExampleProxy]:
    """The values of a trace in containers."""
    found: list[ExampleProxy] = []

    def note(value: Any) -> Any:
        if issubclass(type(value), ExampleProxy):
            found.append(value)
        return value

    fx.node.map_aggregate(values, note)
    return found
