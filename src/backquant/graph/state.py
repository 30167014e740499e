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
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from backquant.graph.clone import is_record, own_buffers, rebuilt
from backquant.graph.example import call
from backquant.graph.moving import ahead, how_far
from backquant.graph.objects import attributes
from backquant.graph.tracer import is_leaf

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
    """All, since hooks write into layers; not TorchScript, nor layers whose averages are in training."""
    for path, part in model.named_modules():
        is_trained = is_leaf(part) and part.training and bool(part._buffers)
        if not is_trained and not isinstance(part, torch.jit.ScriptModule):
            yield path, part


def _attributes(part: nn.Module) -> dict[str, Any]:
    held: dict[str, Any] = {n: value for n, value in part._buffers.items() if value is not None}
    if is_leaf(part) and "training" in _names_in(part.__class__.forward):
        held["training"] = part.training
    return {name: value for name, value in vars(part).items() if name not in _OF_MODULES} | held


def _names_in(forward: Any) -> tuple[str, ...]:
    """What the ``forward`` of a layer reads."""
    code = getattr(forward, "__code__", None)
    return () if code is None else code.co_names


def leaves_of(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """What is in a container or an object, a mark for each end of one among it; any other value itself."""
    items = _items(value) if depth else None
    if items is None:
        yield value
        return
    yield type(value)
    for item in items:
        yield from leaves_of(item, depth - 1)
    yield len(items)


def _items(value: Any) -> Collection[Any] | None:
    """What is in a container or an object (case 4); ``None`` for any other value."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set, deque)):
        return value
    kind: Any = type(value)
    return attributes(value).values() if is_record(kind) else None


def mark(value: Any) -> list[tuple[Any, int]]:
    """The leaves of ``value`` with their versions, which PyTorch counts up with each write in place."""
    return [(leaf, _version(leaf)) for leaf in leaves_of(value)]


def _version(leaf: Any) -> int:
    """A number that writing in place changes, by another view of the memory, past PyTorch's count, or not."""
    if isinstance(leaf, np.ndarray):
        return hash(leaf.tobytes())
    if not isinstance(leaf, torch.Tensor):
        return hash(how_far(leaf))
    version = 0 if leaf.is_inference() else leaf._version
    has_values = leaf.layout is torch.strided and not (leaf.is_meta or leaf.is_quantized)
    if type(leaf) is not torch.Tensor or not has_values:
        return hash(version)
    # Its values, too: .data, and a kernel that keeps averages, write without a version.
    plain = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return hash((leaf.data_ptr(), version, plain.view(torch.uint8).numpy().tobytes()))


def is_other(before: list[tuple[Any, int]], value: Any) -> bool:
    after = mark(value)
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
        self._marks = {key: mark(value) for key, value in self._values()}

    def _values(self) -> Iterator[tuple[Attribute, Any]]:
        if self._only is not None:
            yield from ((key, _value(self._parts[key.path], key.name)) for key in self._only)
            return
        for path, part in self._parts.items():
            for name, value in _attributes(part).items():
                yield Attribute(path, name), value

    def changed(self) -> list[Attribute]:
        """What was written since. Of objects, only tensors, numbers, containers and what moves count."""
        missing: list[tuple[Any, int]] = []
        return [
            key
            for key, value in self._values()
            if is_known(value) and is_other(self._marks.get(key, missing), value)
        ]


def is_known(value: Any) -> bool:
    atoms = (torch.Tensor, np.ndarray, bool, int, float, str, type(None))
    is_kept = isinstance(value, atoms) or _items(value) is not None
    return is_kept or how_far(value) is not None


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
        again = call(trial, inputs)
    except Exception:  # what the first call left has changed what the model does
        return _written_by(model, inputs, first)
    written, trained = before.changed(), [key for key in first if _is_trained(model, key)]
    once = [key for key in first if key not in written]
    written += _first_inputs(model, inputs, once)
    if trained or not written or not _is_read(model, inputs, written):
        first_alone = [] if are_same(output, again) else once
        return _written_by(model, inputs, trained or first_alone)
    read = [key for key in written if len(written) == 1 or _is_read(model, inputs, [key])]
    return _written_by(model, inputs, read or written)


def _is_trained(model: nn.Module, key: Attribute) -> bool:
    part = _part(model, key)
    return is_leaf(part) and (key.name == "training" or key.name in part._buffers)


def _part(model: nn.Module, key: Attribute) -> nn.Module:
    return model.get_submodule(key.path)


def _called(model: nn.Module, inputs: Any) -> nn.Module:
    trial = own_buffers(model)
    call(trial, inputs)
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
    return [key for key, (a, b) in zip(once, pairs, strict=True) if not are_same(a, b)]


def _of_other_values(x: torch.Tensor) -> torch.Tensor:
    """Values of another order; of floats, smaller ones."""
    turned = x.detach().flatten().roll(1).reshape(x.shape)
    return turned * _CHANGED if x.is_floating_point() else turned


def _is_read(model: nn.Module, inputs: Any, written: list[Attribute]) -> bool:
    """Case 2, all of ``written`` at once."""
    numbers = [_held(model, key) for key in written]
    has_numbers = any(
        isinstance(one, (int, float)) for value in numbers for one in leaves_of(value)
    )
    others = (None, *_OTHER_NUMBERS) if has_numbers else (None,)
    return any(_reads(model, inputs, written, other) for other in others)


def _reads(model: nn.Module, inputs: Any, written: list[Attribute], number: int | None) -> bool:
    plain, other = _called(model, inputs), _called(model, inputs)
    try:
        for key in written:
            setattr(_part(other, key), key.name, another(_held(other, key), number))
        wanted, found = call(plain, inputs), call(other, inputs)
    except Exception:  # what it met, it has read
        return True
    afterwards = [(_held(plain, key), _held(other, key)) for key in written]
    return not are_same(wanted, found) or not all(
        are_same(one, two) for one, two in afterwards if isinstance(one, torch.Tensor) and one.dim()
    )


def _held(model: nn.Module, key: Attribute) -> Any:
    return _value(_part(model, key), key.name)


def another(value: Any, number: int | None = None) -> Any:
    """Of the same type and shape, with other values; a list with one more.

    Args:
        number: what numbers become; ``None``: the next one.
    """
    change = partial(another, number=number)
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
    if how_far(value) is not None:
        return ahead(value)
    return value if _items(value) is None else rebuilt(value, change, {})


def are_same(one: Any, other: Any) -> bool:
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


def _written_by(model: nn.Module, inputs: Any, read: list[Attribute]) -> dict[str, tuple[str, ...]]:
    """Case 3."""
    return by_writer(model, inputs, lambda trial: Snapshot(trial, read)) if read else {}


class Watch(Protocol):
    """What says what was written since it was made."""

    def changed(self) -> Iterable[object]: ...


def by_writer(
    model: nn.Module, inputs: Any, watch: Callable[[nn.Module], Watch]
) -> dict[str, tuple[str, ...]]:
    """What a copy of ``model``, which ``watch`` is given, writes in two calls, by the path of the innermost
    module that runs then."""
    trial = own_buffers(model)
    running, found = [""], dict[str, list[str]]()
    snapshot = watch(trial)

    def note() -> None:
        nonlocal snapshot
        if changed := snapshot.changed():
            found.setdefault(running[-1], []).extend(map(str, changed))
            snapshot = watch(trial)

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
            call(trial, inputs)
    return {path: tuple(dict.fromkeys(names)) for path, names in found.items()}


def copy_state(source: nn.Module, target: nn.Module, state: Mapping[str, Collection[str]]) -> None:
    """Give the modules of ``target`` at the paths of ``state`` the state that those of ``source`` have, as
    copies; what a call made alone goes."""
    copied = own_buffers(source)
    for top, names in state.items():
        parts = dict(copied.get_submodule(top).named_modules())
        for path, part in target.get_submodule(top).named_modules():
            if (held := parts.get(path)) is None or type(held) is not type(part):
                continue
            before = _attributes(held)
            for name in _attributes(part).keys() - before.keys():
                if any(one.rpartition(".")[2] == name for one in names):
                    delattr(part, name)
            for name, value in before.items():
                setattr(part, name, value)
