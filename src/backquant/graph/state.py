"""State: what a call of a model writes into the model, and a later call reads.

A graph has inputs and constants. A running mean, a cache of keys, a ring buffer, a counter or a list that
grows is neither: a graph of such a module would give, at each call, what its first call gives.

1. Written is what the *second* call of the same inputs changes: buffers and other tensors in place,
   attributes that are assigned to, lists and dictionaries. What only the first call makes (a table of
   positions, say) is no state, unless its values are others where those of the inputs are (it keeps the
   first inputs), or the second call gives something else and nothing else says why (a first call of its own).
2. It is state where the next call reads it. That is tried: two copies are brought to the same state, in one
   of them the written values are replaced by others (NaN, other numbers), and both are called. Where
   outputs and tensors afterwards are the same bits, the old values were never read (attention maps that are
   kept to be looked at).
3. The module that writes is the innermost one whose ``forward`` runs at the time.
4. Objects of a user's own classes, and modules that are no submodules, are looked into; those of other
   packages only where Python copies them as they are. Layers of PyTorch have state where a ``forward``
   brings them to training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from backquant.errors import InputError
from backquant.graph.clone import is_record, own_buffers, rebuilt
from backquant.graph.costs import MultiplyAdds
from backquant.graph.example import as_arguments, check_inputs
from backquant.graph.interception import Draws
from backquant.graph.objects import attributes, fresh
from backquant.graph.settle import WritesParameterError
from backquant.graph.tracer import is_leaf

__all__ = ["Snapshot", "copy_state", "state_of", "ExampleCall", "first_calls"]

_OF_MODULES = frozenset(vars(nn.Module()))
_DEPTH = 4
_OTHER_NUMBERS = (1, 0, 2, 3, 5, 10**6)  # beside the next one: those that a branch asks for
_CHANGED = 0.75  # of floats among the inputs


class Attribute(NamedTuple):
    """An attribute or a buffer, by the path of its module."""

    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a user wrote, and layers with buffers, which a ``forward`` may bring to training."""
    for path, part in model.named_modules():
        is_written = not is_leaf(part) or (bool(part._buffers) and not part.training)
        if is_written and not isinstance(part, torch.jit.ScriptModule):
            yield path, part


def _attributes(part: nn.Module) -> dict[str, Any]:
    held = {name: value for name, value in part._buffers.items() if value is not None}
    if is_leaf(part):
        return held
    return {name: value for name, value in vars(part).items() if name not in _OF_MODULES} | held


def _leaves(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """What is in a container or an object, a mark for each end of one among it; any other value itself."""
    items = _items(value) if depth else None
    if items is None:
        yield value
        return
    yield type(value)
    for item in items:
        yield from _leaves(item, depth - 1)
    yield len(items)


def _items(value: Any) -> Collection[Any] | None:
    """What is in a container or an object (case 4); ``None`` for any other value."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set, deque)):
        return value
    return attributes(value).values() if is_record(type(value)) else None


def _mark(value: Any) -> list[tuple[Any, int]]:
    """The leaves of ``value`` with their versions, which PyTorch counts up with each write in place."""
    return [(leaf, _version(leaf)) for leaf in _leaves(value)]


def _version(leaf: Any) -> int:
    """A number that writing in place changes, by another view of the memory or not."""
    if isinstance(leaf, np.ndarray):
        return hash(leaf.tobytes())
    if not isinstance(leaf, torch.Tensor):
        return 0
    has_memory = type(leaf) is torch.Tensor and leaf.layout is torch.strided
    place = leaf.data_ptr() if has_memory else 0
    return hash((place, 0 if leaf.is_inference() else leaf._version))


def _is_other(before: list[tuple[Any, int]], value: Any) -> bool:
    after = _mark(value)
    return len(before) != len(after) or any(map(_differ, before, after))


def _differ(before: tuple[Any, int], after: tuple[Any, int]) -> bool:
    (one, version), (other, later) = before, after
    if one is other:
        return version != later
    is_number = isinstance(one, (int, float, str)) and type(one) is type(other)
    return not is_number or one != other


class Snapshot:
    """The attributes of a model at one time.

    >>> class Counting(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.calls = 0
    ...     def forward(self, x):
    ...         self.calls += 1
    ...         return x
    >>> model = Counting()
    >>> before = Snapshot(model)
    >>> _ = model(torch.ones(1))
    >>> [str(attribute) for attribute in before.changed()]
    ['calls']
    """

    def __init__(self, model: nn.Module, only: Iterable[Attribute] | None = None) -> None:
        self._parts = dict(_parts(model))
        self._only = None if only is None else list(only)
        self._marks = {key: _mark(value) for key, value in self._values()}

    def _values(self) -> Iterator[tuple[Attribute, Any]]:
        if self._only is not None:
            yield from ((key, _value(self._parts[key.path], key.name)) for key in self._only)
            return
        for path, part in self._parts.items():
            for name, value in _attributes(part).items():
                yield Attribute(path, name), value

    def changed(self) -> list[Attribute]:
        """What was written since. Objects that are neither tensor, number nor container do not count."""
        missing: list[tuple[Any, int]] = []
        return [
            key
            for key, value in self._values()
            if _is_known(value) and _is_other(self._marks.get(key, missing), value)
        ]


def _is_known(value: Any) -> bool:
    atoms = (torch.Tensor, np.ndarray, bool, int, float, str, type(None))
    return isinstance(value, atoms) or _items(value) is not None


def _value(part: nn.Module, name: str) -> Any:
    return _attributes(part).get(name)


def state_of(
    model: nn.Module, trial: nn.Module, inputs: Any, first: list[Attribute], output: Any
) -> dict[str, tuple[str, ...]]:
    """The state of ``model``: names of attributes by the path of the module that writes them.

    Args:
        trial: a copy of ``model`` that was called once on ``inputs``; it is called again.
        first: what that call wrote.
        output: what it gave.

    >>> class Counting(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.calls = 0
    ...     def forward(self, x):
    ...         self.calls += 1
    ...         return x * self.calls
    >>> model, x = nn.Sequential(Counting()), torch.ones(1)
    >>> trial = own_buffers(model)
    >>> before = Snapshot(trial)
    >>> output = trial(x)
    >>> state_of(model, trial, x, before.changed(), output)
    {'0': ('0.calls',)}
    """
    if not first:
        return {}
    before = Snapshot(trial)
    try:
        again = _run(trial, inputs)
    except Exception:  # what the first call left has changed what the model does
        return _by_writer(model, inputs, first)
    written, trained = before.changed(), [key for key in first if is_leaf(_part(model, key))]
    once = [key for key in first if key not in written]
    written += _first_inputs(model, inputs, once)
    if trained or not written or not _is_read(model, inputs, written):
        first_alone = [] if _are_same(output, again) else once
        return _by_writer(model, inputs, trained or first_alone)
    read = [key for key in written if len(written) == 1 or _is_read(model, inputs, [key])]
    return _by_writer(model, inputs, read or written)


def _part(model: nn.Module, key: Attribute) -> nn.Module:
    return model.get_submodule(key.path)


def _run(trial: nn.Module, inputs: Any) -> Any:
    args, kwargs = as_arguments(inputs)
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        return trial(*fresh(args), **fresh(kwargs))


def _called(model: nn.Module, inputs: Any) -> nn.Module:
    trial = own_buffers(model)
    _run(trial, inputs)
    return trial


def _first_inputs(model: nn.Module, inputs: Any, once: list[Attribute]) -> list[Attribute]:
    """Those of ``once``, which only a first call writes, that other inputs give other values (case 1)."""
    if not once:
        return []
    try:
        one = _called(model, inputs)
        other = _called(model, pytree.tree_map_only(torch.Tensor, _of_other_values, inputs))
    except Exception:  # the model does not take these
        return []
    pairs = ((_held(one, key), _held(other, key)) for key in once)
    return [key for key, (a, b) in zip(once, pairs, strict=True) if not _are_same(a, b)]


def _of_other_values(x: torch.Tensor) -> torch.Tensor:
    """Values of another order; of floats, smaller ones."""
    turned = x.detach().flatten().roll(1).reshape(x.shape)
    return turned * _CHANGED if x.is_floating_point() else turned


def _is_read(model: nn.Module, inputs: Any, written: list[Attribute]) -> bool:
    """Case 2, all of ``written`` at once."""
    numbers = [_held(model, key) for key in written]
    has_numbers = any(isinstance(one, (int, float)) for value in numbers for one in _leaves(value))
    others = (None, *_OTHER_NUMBERS) if has_numbers else (None,)
    return any(_reads(model, inputs, written, other) for other in others)


def _reads(model: nn.Module, inputs: Any, written: list[Attribute], number: int | None) -> bool:
    plain, other = _called(model, inputs), _called(model, inputs)
    for key in written:
        setattr(_part(other, key), key.name, _another(_held(other, key), number))
    try:
        wanted, found = _run(plain, inputs), _run(other, inputs)
    except Exception:  # what it met, it has read
        return True
    afterwards = [(_held(plain, key), _held(other, key)) for key in written]
    return not _are_same(wanted, found) or not all(
        _are_same(one, two)
        for one, two in afterwards
        if isinstance(one, torch.Tensor) and one.dim()
    )


def _held(model: nn.Module, key: Attribute) -> Any:
    return _value(_part(model, key), key.name)


def _another(value: Any, number: int | None = None) -> Any:
    """Of the same type and shape, with other values; a list with one more.

    Args:
        number: what numbers become; ``None``: the next one.
    """
    change = partial(_another, number=number)
    if isinstance(value, (list, deque)) and value:
        one_more = map(change, [*value, value[-1]])
        return deque(one_more, value.maxlen) if isinstance(value, deque) else list(one_more)
    if isinstance(value, tuple):
        return pytree.tree_map(change, value)
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex():
            return torch.full_like(value, float("nan"))
        return ~value if value.dtype == torch.bool else value + 1
    if isinstance(value, np.ndarray):
        return value + 1
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return type(value)(value + 1 if number is None else number)
    if isinstance(value, str):
        return f"{value}'"
    return value if _items(value) is None else rebuilt(value, change, {})


def _are_same(one: Any, other: Any) -> bool:
    first, second = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(first) == len(second) and all(map(_is_same, first, second))


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return not isinstance(one, (int, float, str)) or one == other
    if not isinstance(other, torch.Tensor) or one.shape != other.shape:
        return False
    return bool(torch.equal(one.nan_to_num(), other.nan_to_num())) and bool(
        torch.equal(one.isnan(), other.isnan())
    )


def _by_writer(model: nn.Module, inputs: Any, read: list[Attribute]) -> dict[str, tuple[str, ...]]:
    """Case 3."""
    if not read:
        return {}
    trial = own_buffers(model)
    running, found = [""], dict[str, list[str]]()
    snapshot = Snapshot(trial, read)

    def note() -> None:
        nonlocal snapshot
        if changed := snapshot.changed():
            found.setdefault(running[-1], []).extend(map(str, changed))
            snapshot = Snapshot(trial, read)

    def begins(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            note()
            running.append(path)

        return hook

    def ends(*_: Any) -> None:
        note()
        running.pop()

    for path, part in _parts(trial):
        if is_leaf(part):  # whoever brought it to training writes
            continue
        part.register_forward_pre_hook(begins(path), prepend=True)
        part.register_forward_hook(ends)
    with suppress(Exception):  # as in ``state_of``
        for _ in range(2):
            _run(trial, inputs)
    return {path: tuple(dict.fromkeys(names)) for path, names in found.items()}


def copy_state(source: nn.Module, target: nn.Module, paths: Iterable[str]) -> None:
    """Give the modules of ``target`` at ``paths`` the state that those of ``source`` have, as copies."""
    copied = own_buffers(source)
    for top in paths:
        parts = dict(copied.get_submodule(top).named_modules())
        for path, part in target.get_submodule(top).named_modules():
            if (held := parts.get(path)) is None or type(held) is not type(part):
                continue
            for name, value in _attributes(held).items():
                setattr(part, name, value)


# What a model does with its example inputs: one call, watched.


class ExampleCall(NamedTuple):
    """A call of a model: the inputs, what it gave, the operators that drew random numbers (as
    ``Draws.found``), its multiply-adds, 0 where nothing counts them, and what it leaves in the model for the
    next call (as ``state_of``)."""

    inputs: Any
    output: Any
    drawn: Mapping[str, str]
    multiply_adds: int
    state: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    @classmethod
    def of(cls, model: nn.Module, inputs: Any) -> ExampleCall:
        """Call ``model`` on example inputs. Changes nothing, and raises as ``check_inputs``.

        >>> import torch
        >>> ExampleCall.of(nn.Linear(3, 2), torch.zeros(1, 3)).multiply_adds
        6
        """
        counter, draws, trial = MultiplyAdds(), Draws(), own_buffers(model)
        before = Snapshot(trial)
        try:
            output = check_inputs(model, inputs, counter, draws, trial=trial)
        except WritesParameterError:
            raise
        except InputError:  # counting takes operators apart, which may be what failed
            counter, draws, trial = MultiplyAdds(), Draws(), own_buffers(model)
            before = Snapshot(trial)
            output = check_inputs(model, inputs, draws, trial=trial)
        state = state_of(model, trial, inputs, before.changed(), output)
        return cls(inputs, output, draws.found, counter.count, state)


def first_calls(model: nn.Module, paths: Iterable[str], inputs: Any) -> dict[str, Any]:
    """The example inputs of the parts at ``paths``: those of each part's first call, in one call of ``model``
    in evaluation mode. Parts that are not called, or called with positional and keyword arguments, have
    none; where the call fails, no part has any.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    >>> first_calls(model, ["1"], torch.zeros(5, 3))["1"][0].shape
    torch.Size([5, 2])
    """
    copied, found = own_buffers(model).eval(), dict[str, Any]()

    def note(path: str, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not (args and kwargs):
            found.setdefault(path, kwargs or args)

    for path in paths:
        copied.get_submodule(path).register_forward_pre_hook(partial(note, path), with_kwargs=True)
    args, kwargs = as_arguments(inputs)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            copied(*fresh(args), **fresh(kwargs))
    except Exception:  # the model is called, and its errors told, where its example is checked
        return {}
    return found
