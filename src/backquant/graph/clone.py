"""Copies of a module tree: new module objects, the same tensors.

Everything that is done to a captured model is done to such a copy, so that the module tree that
the user passed in is never touched.
"""

from __future__ import annotations

import copy
import enum
import functools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from backquant.graph import moving
from backquant.graph.hooks import hold_computed_weights
from backquant.graph.objects import attributes
from backquant.identifiers import attribute, identifier, label

# Containers in which a module may keep references to its submodules.
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set, deque})
_DEPTH = 4
_HEAP_TYPE = 1 << 9  # a class that was made by a class statement
#: The packages whose code is not the user's.
FOREIGN = frozenset({"torch", "backquant", *sys.stdlib_module_names})
_COPYING = ("__reduce_ex__", "__reduce__", "__getstate__", "__copy__", "__deepcopy__")
_OF_MODULES = frozenset(vars(nn.Module()))

_TABLES = ("_modules", "_parameters", "_buffers")

# Types whose values contain no module.
_NUMBERS = frozenset({bool, int, float, str, type(None), torch.dtype, torch.qscheme})
_ATOMS = _NUMBERS | {torch.Tensor, nn.Parameter}


def shallow_copy(model: nn.Module) -> nn.Module:
    """A module tree of new objects that hold the very parameters and buffers of ``model``.

    Invariants

    1. A submodule that stands in several places stands in the same places of the copy, once copied.
    2. Dictionaries and lists of the modules (parameters, hooks, own attributes) are new, and so are objects
       of the user's classes in them, so that adding to or removing from the copy leaves ``model`` as it is.
    3. TorchScript modules cannot be copied and are shared.

    >>> conv = nn.Conv2d(1, 1, 1)
    >>> twice = nn.Sequential(conv, conv)
    >>> copied = shallow_copy(twice)
    >>> copied[0] is conv, copied[0] is copied[1], copied[0].weight is conv.weight
    (False, True, True)
    """
    copies: dict[int, Any] = {}
    modules = list(model.modules())
    for module in modules:
        copies[id(module)] = _blank(module)
    for module in modules:
        copied = copies[id(module)]
        if copied is not module:
            copied.__dict__.update(_state(vars(module), copies))
    made: nn.Module = copies[id(model)]
    return made


def without_parametrizations(copied: nn.Module) -> nn.Module:
    """``copied``, a shallow copy in evaluation mode, whose modules hold what their parametrizations and
    PyTorch's hooks before calls (old weight norm, pruning) compute, in place.

    >>> model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    >>> copied = without_parametrizations(shallow_copy(model))
    >>> type(copied[0]).__name__, torch.equal(copied[0].weight, model[0].weight)
    ('Linear', True)
    """
    for module in list(copied.modules()):
        hold_computed_weights(module)
        if not is_parametrized(module):
            continue
        with torch.no_grad():
            names = list(module.parametrizations)  # type: ignore[arg-type]
            values = {name: nn.Parameter(getattr(module, name).detach()) for name in names}
        kind = type_before_parametrizations(module)
        del module._modules["parametrizations"]
        module.__class__ = kind
        module._parameters.update(values)
    return copied


def own_buffers(model: nn.Module) -> nn.Module:
    """A shallow copy whose buffers, and tensors in its attributes, are its own: running it leaves those of
    the original alone.

    >>> bn = nn.BatchNorm1d(2)
    >>> copied = own_buffers(bn)
    >>> copied.running_mean is bn.running_mean, copied.weight is bn.weight
    (False, True)
    """
    copied = shallow_copy(model)
    _own_state(copied)
    return copied


def _own_state(copied: nn.Module) -> None:
    """Give ``copied`` buffers and attributes of its own, the tensors and arrays in them too."""
    of_memory = {_memory(b): b for b in copied.buffers() if type(b) is torch.Tensor}
    made = _replace_tensors(copied, "_buffers", lambda t: t.detach().clone())
    made |= {id(part): part for part in copied.modules()}

    def own(value: Any) -> Any:
        if type(value) is torch.Tensor:
            if id(value) not in made:
                whole = of_memory.get(_memory(value))
                made[id(value)] = (
                    value.detach().clone()
                    if whole is None
                    else _view_of(made[id(whole)], whole, value)
                )
            return made[id(value)]
        return value.copy() if isinstance(value, np.ndarray) else moving.copied(value)

    for part in copied.modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue
        held = vars(part)
        kept = [n for n, v in held.items() if n not in _OF_MODULES and type(v) not in _NUMBERS]
        held.update({name: rebuilt(held[name], own, made) for name in kept})


def _view_of(copied: torch.Tensor, whole: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """What is to ``copied`` as ``view`` is to ``whole``, where that has all of its elements.

    >>> whole, copied = torch.zeros(4, 2), torch.ones(4, 2)
    >>> _view_of(copied, whole, whole[1]).data_ptr() == copied[1].data_ptr()
    True
    """
    start = view.storage_offset() - whole.storage_offset()
    last = sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
    is_inside = whole.is_contiguous() and start >= 0 and start + last < whole.numel()
    if not is_inside or view.dtype != whole.dtype or not view.numel():
        return view.detach().clone()
    return copied.as_strided(view.shape, view.stride(), copied.storage_offset() + start)


@contextmanager
def with_own_buffers(copied: nn.Module) -> Iterator[None]:
    """While it is open, ``copied``, a shallow copy that nobody else uses, holds copies of its buffers: what a
    call does to them is gone afterwards.

    >>> bn = nn.BatchNorm1d(2)
    >>> with with_own_buffers(bn):
    ...     _ = bn(torch.ones(3, 2))
    >>> bn.running_mean
    tensor([0., 0.])
    """
    parts = [part for part in copied.modules() if not isinstance(part, torch.jit.ScriptModule)]
    with _as_before([part._buffers for part in parts if part._buffers]):
        _replace_tensors(copied, "_buffers", lambda t: t.detach().clone())
        yield


@contextmanager
def with_own_state(copied: nn.Module) -> Iterator[None]:
    """As ``with_own_buffers``, and with copies of attributes, and of the tensors in them; what a call assigns
    is gone, too.

    >>> module = nn.Identity()
    >>> module.seen = []
    >>> with with_own_state(module):
    ...     module.seen.append(1)
    ...     module.count = 1
    >>> module.seen, hasattr(module, "count")
    ([], False)
    """
    parts = [part for part in copied.modules() if not isinstance(part, torch.jit.ScriptModule)]
    tables = [vars(part) for part in parts]
    with _as_before([*tables, *(part._buffers for part in parts if part._buffers)]):
        _own_state(copied)
        yield


@contextmanager
def _as_before(tables: list[dict[str, Any]]) -> Iterator[None]:
    held = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, before in zip(tables, held, strict=True):
            table.clear()
            table.update(before)


def own_tensors(model: nn.Module) -> nn.Module:
    """A shallow copy whose parameters and buffers are its own; ties between them are kept.

    >>> linear = nn.Linear(2, 2)
    >>> copied = own_tensors(nn.ModuleList([linear, linear]))
    >>> copied[0].weight is linear.weight, copied[0].weight is copied[1].weight
    (False, True)
    """
    copied = shallow_copy(model)
    own_in_place(copied)
    return copied


def own_in_place(copied: nn.Module) -> None:
    """Give ``copied``, a shallow copy, parameters and buffers of its own; ties between them are kept.

    >>> linear = nn.Linear(2, 2)
    >>> copied = shallow_copy(linear)
    >>> own_in_place(copied)
    >>> copied.weight is linear.weight
    False
    """
    _replace_tensors(copied, "_parameters", _own_parameter)
    _replace_tensors(copied, "_buffers", lambda t: t.detach().clone())


def _own_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """A copy with the attributes that were set on ``parameter`` (optimizers are set up by them)."""
    copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
    copied.__dict__.update(parameter.__dict__)
    return copied


def _replace_tensors(model: nn.Module, kind: str, make: Any) -> dict[int, Any]:
    """Replace tensors; gives what stands for each, by the ``id`` of those before."""
    made: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        tensors = getattr(module, kind)
        for name, tensor in tensors.items():
            if tensor is not None:
                if id(tensor) not in made:
                    made[id(tensor)] = make(tensor)
                tensors[name] = made[id(tensor)]
        if isinstance(module, nn.RNNBase) and kind == "_parameters":
            module._flat_weights = [getattr(module, n) for n in module._flat_weights_names]
    return made


def _blank(module: nn.Module) -> nn.Module:
    if isinstance(module, torch.jit.ScriptModule):
        return module
    blank: nn.Module = object.__new__(type(module))
    return blank


def _state(state: dict[str, Any], copies: dict[int, Any]) -> dict[str, Any]:
    """The attributes of a module for its copy. Most are atoms and empty tables of hooks."""

    def of_copy(value: Any) -> Any:
        if isinstance(value, types.MethodType) and id(value.__self__) in copies:
            return types.MethodType(value.__func__, copies[id(value.__self__)])
        return value

    found = {}
    for name, value in state.items():
        kind = type(value)
        if kind in _ATOMS:
            found[name] = value
        elif kind in _CONTAINERS and not value and kind is not deque:
            found[name] = kind()
        elif name in _TABLES:
            found[name] = kind((key, copies.get(id(item), item)) for key, item in value.items())
        else:
            found[name] = rebuilt(value, of_copy, copies)
    return found


def rebuilt(
    value: Any, change: Callable[[Any], Any], made: dict[int, Any], depth: int = _DEPTH
) -> Any:
    """``value`` in new containers and objects, with ``change`` of what is in them.

    Args:
        made: what stands for an object or a module, by ``id``; what is met is added to it.
        depth: how many containers and objects within each other are made anew; those inside are kept.

    >>> rebuilt([1, {"a": types.SimpleNamespace(b=2)}], lambda value: value + 1, {})
    [2, {'a': namespace(b=3)}]
    """
    kind: Any = type(value)
    if id(value) in made:
        return made[id(value)]
    if kind in _CONTAINERS:
        if depth == 0:
            return value
        if kind is dict or kind is OrderedDict:
            pairs = ((key, rebuilt(item, change, made, depth - 1)) for key, item in value.items())
            return kind(pairs)
        items = [rebuilt(item, change, made, depth - 1) for item in value]
        return deque(items, value.maxlen) if kind is deque else kind(items)
    if (
        kind in _ATOMS
        or not depth
        or not is_record(kind)
        or isinstance(value, torch.jit.ScriptModule)
    ):
        return change(value)
    try:
        copied: Any = _blank(value) if isinstance(value, nn.Module) else copy.copy(value)
    except Exception:  # of the user's class: one that cannot be copied is shared
        return change(value)
    made[id(value)] = copied
    for name, held in attributes(value).items():
        object.__setattr__(copied, name, rebuilt(held, change, made, depth - 1))
    if isinstance(value, dict):
        pairs = ((key, rebuilt(item, change, made, depth - 1)) for key, item in value.items())
        dict.update(copied, pairs)  # a Counter's own adds
    return copied


@functools.cache
def is_record(kind: Any) -> bool:
    """Whether objects of a class are what their attributes are: classes of a user that leave it to Python
    how they are copied, dictionaries, and modules.

    >>> is_record(types.SimpleNamespace), is_record(nn.Linear), is_record(type(print))
    (True, True, False)
    """
    if issubclass(kind, (types.SimpleNamespace, dict, nn.Module)):
        return True
    is_own = kind.__module__.partition(".")[0] not in FOREIGN
    is_plain = all(getattr(kind, n, None) is getattr(object, n, None) for n in _COPYING)
    is_class = bool(kind.__flags__ & _HEAP_TYPE) and not issubclass(kind, (type, enum.Enum))
    return is_own and is_plain and is_class


def own_shared_tensors(module: nn.Module, source: nn.Module) -> None:
    """Replace what ``module`` shares with ``source`` by copies; ties and strides are kept.

    So that nothing done to one reaches the other: ``quantized.half()``, or training of the original.

    >>> source = nn.LayerNorm(2)
    >>> module = nn.Sequential(nn.Identity())
    >>> module[0].weight = source.weight
    >>> own_shared_tensors(module, source)
    >>> module[0].weight is source.weight, bool(module[0].weight.eq(source.weight).all())
    (False, True)
    """
    foreign = {_memory(tensor) for tensor in _tensors(source)}
    copies: dict[int, torch.Tensor] = {}
    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and _memory(tensor) in foreign:
                    table[name] = copies.setdefault(id(tensor), _copy(tensor))
        if isinstance(part, nn.RNNBase):
            part._init_flat_weights()


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            yield from (tensor for tensor in table.values() if tensor is not None)


def _memory(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:  # sparse: no memory of its own
        return id(tensor)
    return tensor.untyped_storage().data_ptr() if tensor.numel() else 0


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied


# Copies of models whose modules, parameters and buffers have names that graphs can hold.
#
# ``torch.fx`` and ``torch.export`` write names into source (``backquant.identifiers``), so names are written
# out before a capture, on a copy. The code of the model goes on to use its own: the copy answers to them.
#
# 1. A model whose names are all plain is returned as it is.
# 2. Modules with other names are of a subclass of their class in which attributes, keys of a ``ModuleDict``
# and    ``named_children`` have the user's names. What a ``forward`` reads of ``_modules``, or of
# ``named_parameters``, has the plain ones. 3. Modules that ``whole`` names stay as they are inside: nothing
# of them is written into source.


def with_plain_names(
    model: nn.Module, whole: Callable[[nn.Module], bool] = lambda _: False
) -> nn.Module:
    """``model`` if its names are plain, or a copy with such names that holds the same tensors.

    >>> model = nn.ModuleDict({"in": nn.ReLU(), "µ": nn.Tanh(), "μ": nn.ELU()})
    >>> copied = with_plain_names(model)
    >>> [name for name, _ in copied.named_modules()]
    ['', 'bqname_in', 'bqname__b5_', 'bqname__3bc_']
    >>> list(copied), copied["µ"], copied["μ"]
    (['in', 'µ', 'μ'], Tanh(), ELU(alpha=1.0))
    """
    if all(_is_plain(part, model) or whole(part) for part in model.modules()):
        return model
    copied = shallow_copy(model)
    for part in list(copied.modules()):
        if not (_is_plain(part, copied) or whole(part)):
            _rename(part, _plain(part, copied))
    return copied


def _plain(part: nn.Module, model: nn.Module) -> Callable[[str], str]:
    """How names in ``part`` of ``model`` are written."""
    return attribute if part is model else identifier


def _is_plain(part: nn.Module, model: nn.Module) -> bool:
    if isinstance(part, torch.jit.ScriptModule):  # shared by copies, and never taken apart
        return True
    plain = _plain(part, model)
    return all(plain(name) == name for table in _TABLES for name in getattr(part, table))


def _rename(part: nn.Module, plain: Callable[[str], str]) -> None:
    for key in _TABLES:
        own = getattr(part, key)
        vars(part)[key] = type(own)((plain(name), value) for name, value in own.items())
    part._non_persistent_buffers_set = set(map(plain, part._non_persistent_buffers_set))
    part.__class__ = _answering(type(part))  # type: ignore[arg-type]  # torch's classes are hashable


@functools.cache
def _answering(kind: type[nn.Module]) -> type[nn.Module]:
    """Rule 2: ``kind`` for modules whose tables have plain names."""
    bases = (_NamedByKey, kind) if issubclass(kind, nn.ModuleDict) else (_Named, kind)
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "stands_for": kind}
    return type(kind.__name__, bases, own)


def _blank_module(kind: type[nn.Module]) -> nn.Module:
    made = _answering(kind)  # type: ignore[arg-type]
    return made.__new__(made)


class _Named(nn.Module):
    def _plain(self, name: str) -> str:
        """The name in the tables, if there are any and they have one for the user's ``name``."""
        held = {key for table in _TABLES for key in self.__dict__.get(table, ())}
        return next((plain for plain in (identifier(name), attribute(name)) if plain in held), name)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(self._plain(name))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(self._plain(name), value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(self._plain(name))

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        for name, child in super().named_children():
            yield label(name), child

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        kind: Any = type(self)
        return _blank_module, (kind.stands_for,), self.__dict__


class _NamedByKey(_Named, nn.ModuleDict):
    def _own(self) -> dict[str, nn.Module]:
        return {label(name): part for name, part in self._modules.items() if part is not None}

    def __getitem__(self, key: str) -> nn.Module:
        return super().__getitem__(self._plain(key))

    def __contains__(self, key: str) -> bool:
        return self._plain(key) in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._own())

    def keys(self) -> Any:
        return self._own().keys()

    def items(self) -> Any:
        return self._own().items()
