"""What a call of a model leaves outside of it for the next: in global variables, closures, classes, defaults,
iterators, generators of random numbers. A graph holds what it met there while it was captured.

1. Looked at is what the user's code that runs names: from each ``forward`` and hook on, through the
   functions, classes and modules that it names.
2. Of a value, what ``backquant.graph.state`` sees: other numbers, tensors written in place, containers that
   grow, iterators and generators that have moved.
3. A place counts where what calls on the same inputs give depends on it: 16 calls as it is, and one with
   another value in it, are compared. The value before stands there again afterwards.
4. What else gives other values at each call (a clock, a library's own state) is found by these calls, too.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from backquant.graph.clone import FOREIGN, own_buffers
from backquant.graph.example import call
from backquant.graph.state import another, are_same, by_writer, is_known, is_other, mark
from backquant.graph.tracer import is_leaf

_CALLS = 16
_NOISE = 1e-9  # of the power of an output: what threads that add in another order leave
#: The generators that all code shares.
GENERATORS: dict[str, Any] = {
    "Python's random": vars(random)["_inst"],
    "numpy.random": vars(np.random.mtrand)["_rand"],
}


_HOLDING_CODE = (functools.partial, MethodType, property, staticmethod, classmethod)
_HELD = {
    "func": "a function in a partial",
    "args": "an argument of a partial",
    "keywords": "a keyword of a partial",
    "__func__": "the function of a method",
    "__self__": "the object of a method",
    "fget": "a property",
}


class Place(NamedTuple):
    """A value outside of the model: in a table of names, an object's attributes, or a closure."""

    home: Any
    name: str
    label: str

    def __str__(self) -> str:
        return self.label

    @property
    def value(self) -> Any:
        """What it holds; ``None`` where it holds nothing."""
        if isinstance(self.home, CellType):
            with suppress(ValueError):
                return self.home.cell_contents
            return None
        table = self.home if isinstance(self.home, dict) else vars(self.home)
        return table.get(self.name)

    def put(self, value: Any) -> None:
        if isinstance(self.home, CellType):
            self.home.cell_contents = value
        elif isinstance(self.home, dict):
            self.home[self.name] = value
        else:
            setattr(self.home, self.name, value)


@contextmanager
def codes_run() -> Iterator[set[CodeType]]:
    """The code that runs in this thread while it is open. Somebody's profiler is left alone after it, too.

    >>> with codes_run() as ran:
    ...     _ = nn.Linear(1, 1)(torch.ones(1, 1))
    >>> nn.Linear.forward.__code__ in ran
    True
    """
    ran, before = set[CodeType](), sys.getprofile()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            ran.add(frame.f_code)

    sys.setprofile(note)
    try:
        yield ran
    finally:
        sys.setprofile(before)


def places_of(model: nn.Module, ran: Collection[CodeType]) -> list[Place]:
    """Case 1, and the generators that Python and numpy share. ``ran``: the code that a call runs.

    >>> scales = {"__name__": "mine", "calls": 0}
    >>> exec("def step(x):\\n    global calls\\n    calls += 1\\n    return x * calls", scales)
    >>> model = nn.Module()
    >>> model.step = scales["step"]
    >>> [str(place) for place in places_of(model, {model.step.__code__})]
    ["Python's random", 'numpy.random', "the global variable 'calls'"]
    """
    walk = _Walk(ran)
    for part in model.modules():
        if not is_leaf(part):
            walk.of_class(type(part))
        for table in (part._forward_hooks, part._forward_pre_hooks):
            walk.through(table.values())
        walk.through(vars(part).values())
    shared = [Place({name: state}, name, name) for name, state in GENERATORS.items()]
    return [*shared, *walk.places.values()] if walk.functions else []


class _Walk:
    """From code to the places that it names."""

    def __init__(self, ran: Collection[CodeType]) -> None:
        self.places: dict[tuple[int, str], Place] = {}
        self.ran = ran
        self.classes: set[type] = set()
        self.functions: set[FunctionType] = set()

    def through(self, values: Iterable[Any]) -> None:
        for value in values:
            self._enter(value, ())

    def of_class(self, kind: type) -> None:
        """The functions of a user's class, and what it holds for all of its objects."""
        for one in kind.__mro__:
            if _is_foreign(one) or one in self.classes:
                continue
            self.classes.add(one)
            for name, value in list(vars(one).items()):
                if not self._enter(value, ()) and not name.startswith("__"):
                    self._add(one, name, f"{one.__name__}.{name}")

    def _enter(self, value: Any, names: Iterable[str]) -> bool:
        """Follow code, and the code of objects; whether ``value`` is code, and no data."""
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self.of_class(value)
        elif isinstance(value, ModuleType):
            if not _is_foreign(value):
                self._names(vars(value), names, f"{value.__name__}.{{}}")
        elif isinstance(value, _HOLDING_CODE):
            for name, label in _HELD.items():
                held = _attribute(value, name)
                for one in held or () if name == "args" else (held,):
                    self._value(Place({label: one}, label, label), ())
        else:
            self.of_class(type(value))
            return False
        return True

    def _function(self, function: FunctionType) -> None:
        if function in self.functions or function.__code__ not in self.ran or _is_foreign(function):
            return
        self.functions.add(function)
        names = list(_names(function.__code__))
        self._names(function.__globals__, names, "the global variable {!r}")
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            self._value(Place(cell, "", f"the closure's variable {name!r}"), names)
        for table in (vars(function), function.__kwdefaults__ or {}):
            self._names(table, list(table), f"{function.__name__}.{{}}")
        for value in function.__defaults__ or ():
            held = {"default": value}
            self._value(Place(held, "default", f"a default of {function.__name__}"), names)

    def _names(self, table: dict[str, Any], names: Iterable[str], label: str) -> None:
        for name in names:
            if name in table:
                self._value(Place(table, name, label.format(name)), names)

    def _value(self, place: Place, names: Iterable[str]) -> None:
        is_shared = any(place.value is one for one in GENERATORS.values())
        if not is_shared and not self._enter(place.value, names):
            self._add(*place)

    def _add(self, home: Any, name: str, label: str) -> None:
        self.places.setdefault((id(home), name), Place(home, name, label))


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:  # of a user's class
        return None


def _is_foreign(value: Any) -> bool:
    """Of PyTorch, of this package, or of Python's own library."""
    module = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return str(module).partition(".")[0] in FOREIGN


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


class _Marks:
    """What places hold at one time."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._marks = [(place, mark(place.value)) for place in places]

    def changed(self) -> list[Place]:
        """Where another value is now."""
        pairs = ((place, before, place.value) for place, before in self._marks)
        return [place for place, before, now in pairs if is_known(now) and is_other(before, now)]


@contextmanager
def generators_as_before() -> Iterator[None]:
    """While it is open, Python's and numpy's random numbers are drawn as from here; afterwards, too.

    >>> with generators_as_before():
    ...     drawn = random.random()
    >>> drawn == random.random()
    True
    """
    plain, array = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(plain)
        np.random.set_state(array)


def outside_of(
    model: nn.Module, inputs: Any, output: Any, ran: Collection[CodeType]
) -> dict[str, tuple[str, ...]]:
    """Places that a call of ``model`` changes and the next one reads, by the path of the module that changes
    them; no name where calls give other values for a reason that has no place.

    ``output``: what a call on ``inputs`` gave; ``ran``: the code that it ran.

    >>> outside_of(nn.Linear(2, 2), torch.ones(1, 2), None, ())
    {}
    """
    places = places_of(model, ran)
    if not places:
        return {}
    before = _Marks(places)
    call = functools.partial(_called, model, inputs)
    again = call()
    moved = before.changed()
    if not moved and _are_alike(output, again):
        return {}
    if all(_are_alike(again, call()) for _ in range(_CALLS)):
        moved = [place for place in moved if _is_read(place, call, again)]
        return by_writer(model, inputs, lambda _: _Marks(moved)) if moved else {}
    found = by_writer(model, inputs, lambda _: _Marks(moved)) if moved else {}
    return found or {_first_other(model, inputs): ()}


def _called(model: nn.Module, inputs: Any) -> Any:
    own = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, inputs)
    return call(own_buffers(model), own)


def _are_alike(one: Any, other: Any) -> bool:
    if are_same(one, other):
        return True
    first, second = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(first) == len(second) and all(map(_is_near, first, second))


def _is_near(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not one.is_floating_point() or one.shape != other.shape:
        return are_same(one, other)
    signal, noise = one.double().nan_to_num(), (one.double() - other.double()).nan_to_num()
    is_small = noise.square().sum() <= _NOISE * signal.square().sum()
    return bool(is_small) and torch.equal(one.isfinite(), other.isfinite())


def _is_read(place: Place, call: Callable[[], Any], wanted: Any) -> bool:
    """Case 3."""
    held = place.value
    try:
        place.put(another(held))
        return not _are_alike(wanted, call())
    except Exception:  # what the call met, it has read
        return True
    finally:
        place.put(held)


def _first_other(model: nn.Module, inputs: Any) -> str:
    """The innermost module that gives other values in the second of two calls."""

    def outputs() -> list[tuple[str, Any]]:
        trial, found = own_buffers(model), list[tuple[str, Any]]()
        for path, part in trial.named_modules():
            part.register_forward_hook(
                lambda *call, path=path: found.append((path, copy.deepcopy(call[2])))
            )
        call(trial, inputs)
        return found

    pairs = zip(outputs(), outputs(), strict=False)
    return next((path for (path, one), (_, two) in pairs if not _are_alike(one, two)), "")
