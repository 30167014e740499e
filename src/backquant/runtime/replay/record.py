"""The operators that a call dispatches, recorded with every size and constant; kinds of calls."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from backquant.graph.interception import DispatchMode
from backquant.graph.objects import attributes, is_object
from backquant.lower.kernels.configured import KernelModule

# What the calls have in common that one recording answers.
#
# Arguments are taken apart into tensors and all else: lists, dicts, classes that are registered with
# ``torch.utils._pytree``, and, of exported models, objects of any class. An exported graph reads data of its
# objects, and calls none of their methods: so what they hold says what the graph gets.

_PLAIN = (int, float, bool, str, type(None))
_NAMED = (torch.dtype, torch.device, type, enum.Enum)
_TENSORS = (torch.Tensor, nn.Parameter)


class Arguments:
    """``tensors``: of the call, each once, in order. ``kind``: equal for calls like each other; ``None`` for
    those that are not replayed: with tensors of other classes or devices, or none, or objects where
    ``takes_objects`` is false.

    >>> x = torch.ones(2)
    >>> one, other = Arguments((x, [x, -x]), {}), Arguments((-x, [x, x]), {})
    >>> len(one.tensors), one.kind == other.kind, one.kind == Arguments((x + x, [-x, x]), {}).kind
    (2, False, False)
    >>> Arguments((x, object()), {}).kind is None
    True
    """

    def __init__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, takes_objects: bool = False
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        self.kind: Hashable | None
        if not kwargs and len(args) == 1 and type(args[0]) is torch.Tensor:  # the usual call
            self.tensors.append(args[0])
            self.kind = layout(args[0])
            return
        self._takes_objects = takes_objects
        self._places: dict[int, int] = {}
        # ids of the objects around the current value, to stop at cycles
        self._above: list[int] = []
        found: list[Hashable] = [(len(args), *kwargs)]
        self._found = found
        for value in args:
            self._visit(value)
        for value in kwargs.values():
            self._visit(value)
        self.kind = tuple(found) if self.tensors and None not in found else None

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if kind in _TENSORS:
            self._found.append(self._tensor(value))
        elif isinstance(value, _PLAIN):
            # 0.0 == -0.0, but results may differ
            self._found.append((kind, value) if value != 0.0 else (kind, str(value)))
        elif kind in (list, tuple) or (isinstance(value, tuple) and hasattr(kind, "_fields")):
            self._parts((kind, len(value)), value)
        elif kind is dict:
            self._parts((kind, *value), value.values())
        elif kind in pytree.SUPPORTED_NODES:
            parts, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
            self._parts((kind, len(parts)), parts)
            self._visit(context)
        elif isinstance(value, _NAMED):
            self._found.append(value)
        elif self._takes_objects and is_object(value):
            self._object(value)
        else:
            self._found.append(None)

    def _tensor(self, tensor: torch.Tensor) -> Hashable | None:
        place = self._places.setdefault(id(tensor), len(self.tensors))
        if place < len(self.tensors):
            return place
        self.tensors.append(tensor)
        return layout(tensor)

    def _parts(self, head: Hashable, parts: Any) -> None:
        self._found.append(head)
        for part in parts:
            self._visit(part)

    def _object(self, value: Any) -> None:
        if id(value) in self._above:
            self._found.append(None)
            return
        self._above.append(id(value))
        held = attributes(value)
        self._parts((type(value), *held), held.values())
        self._above.pop()


def layout(tensor: torch.Tensor) -> Hashable | None:
    """The properties of a tensor that a recording depends on; ``None`` for a tensor that cannot be recorded.

    >>> layout(torch.ones(2, 3).T)
    (torch.float32, torch.Size([3, 2]), (1, 3), 0)
    """
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


# The aten overloads by which recorded calls show the memory of a tensor, or copy it.

_aten = torch.ops.aten

SET_STORAGE = _aten.set_.source_Storage_storage_offset
SET_TENSOR = _aten.set_.source_Tensor_storage_offset
SETS = (SET_STORAGE, SET_TENSOR)
AS_STRIDED = _aten.as_strided.default
CLONE = _aten.clone.default
DEQUANTIZE = _aten.dequantize.self
#: Makes a quantized tensor from plain integers.
COPY = _aten._make_per_tensor_quantized_tensor.default
#: A tensor without values.
BLANK = frozenset({_aten.empty.memory_format, _aten._empty_affine_quantized.default})
#: The result has the values of the argument.
COPIES = frozenset({CLONE, _aten.contiguous.default, _aten.detach.default, _aten.alias.default})
#: Operators without side effects; ``set_`` counts, since it is applied to new tensors only.
WITHOUT_EFFECT = frozenset({COPY, *SETS, AS_STRIDED, *BLANK})
#: Operators of recordings that are replaced where a recording becomes a graph.
REPLAYED_AS = {
    SET_STORAGE: SET_TENSOR,
    # Their schemas do not say that they return views. If a constant is computed ahead (a state of zeros),
    # writes to such a part would change it from call to call; these schemas say so.
    _aten._unsafe_view.default: _aten.view.default,
    _aten.unsafe_split.Tensor: _aten.split.Tensor,
    _aten.unsafe_split_with_sizes.default: _aten.split_with_sizes.default,
}
#: With a mask as index, the size of its result depends on values.
INDEX = _aten.index.Tensor


# Recording the operators of one call.
#
# A recording holds names and literals, no tensors but the constants: parameters, buffers and packed
# weights of the model. Refused (``NotReplayable``), because a replay would not do what the model does:
#
# 1. A tensor that is no input, no result of a recorded operator and no known constant.
# 2. An operator that reads a tensor and gives a number (``.item()``, a comparison that Python reads): the
#    number may decide what comes next. What reads no tensor (``promote_types``) gives the same at each call.
# 3. An operator whose arguments are of a kind that the program cannot hold.
# 4. An operator whose result has as many rows as values say (``nonzero``, a mask as an index), and what takes
#    sizes from values unseen by the dispatcher (``tolist``, ``tensor_split`` at the places in a tensor): the
#    sizes that Python read would be those of the recorded call.
# 5. ``torch.cond`` and its like, whose branches run as values say.


class NotReplayable(Exception):  # noqa: N818 - a reason, no error of the user's
    """Why a call cannot be replayed. Internal: such a call runs operator by operator."""


@dataclass(frozen=True)
class Ref:
    """The name of a tensor in a recording."""

    name: str


@dataclass(frozen=True)
class Call:
    """One operator: its arguments by position (tensors as ``Ref``), and the names of its results.
    ``outputs``: a name, a tuple of names for one list of tensors, or None for what is no tensor.
    ``origin``: what called it, as ``record`` was told."""

    operator: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    outputs: tuple[str | tuple[str, ...] | None, ...]
    origin: str = ""


class Layout(NamedTuple):
    """How a tensor of a recording lies in memory; scale and zero point of a quantized one."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    qparams: tuple[float, int] | None
    dtype: torch.dtype


@dataclass
class Recording:
    """``inputs``: names of the distinct tensors among the flattened arguments, in their order. ``result``:
    the structure of the result, its tensors as ``Ref``. ``constants``: tensors by name. ``layouts``: of the
    tensors by name."""

    inputs: tuple[str, ...]
    calls: list[Call] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    result: Any = None


def known_constants(module: nn.Module) -> Iterable[torch.Tensor]:
    """The tensors that a model reads but does not compute.

    >>> [tuple(t.shape) for t in known_constants(nn.Linear(2, 3))]
    [(3, 2), (3,)]
    """
    for part in module.modules():
        yield from (p for p in part._parameters.values() if p is not None)
        yield from (b for b in part._buffers.values() if b is not None)
        if isinstance(part, KernelModule):
            yield from part.packed_tensors()
    for value in vars(module).values():
        if isinstance(value, torch.Tensor):
            yield value


def record(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    constants: Callable[[], Iterable[torch.Tensor]],
    origin: Callable[[], str] = str,
) -> tuple[Any, Recording | NotReplayable]:
    """Call ``function`` and note what it dispatches; gives its result, too. The inputs of the recording are
    the ``Arguments.tensors`` of the call.

    ``constants`` is asked when the call is over, so that it may name what the call itself packed;
    ``origin`` at each operator.
    The call always runs to its end; instead of a recording there may be the reason why there is none.

    >>> result, recording = record(lambda x: torch.relu(x) + 1, (torch.ones(1),), {}, list)
    >>> [str(call.operator) for call in recording.calls], recording.result
    (['aten.relu.default', 'aten.add.Tensor'], Ref(name='%2'))
    >>> record(lambda x: x * x.sum().item(), (torch.ones(1),), {}, list)
    (tensor([1.]), NotReplayable('aten._local_scalar_dense.default gives no tensor'))
    >>> record(lambda x: x * x.tolist()[0], (torch.ones(1),), {}, list)
    (tensor([1.]), NotReplayable('tolist reads the values of a tensor'))
    """
    recorder = _Recorder(Arguments(args, kwargs, takes_objects=True).tensors, origin)
    with recorder, _Reads(recorder), as_without_modes():
        result = function(*args, **kwargs)
    try:
        return result, recorder.finish(result, constants())
    except NotReplayable as problem:
        return result, problem


class _Reads(TorchFunctionMode):
    """Notices reads of values that dispatch no operator."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "").partition(".")[0]
        if name in _READS or (name == "tensor_split" and _has_tensors(args[1:], kwargs or {})):
            self.recorder.problem = NotReplayable(f"{name} reads the values of a tensor")
        return func(*args, **(kwargs or {}))


_READS = frozenset({"tolist", "numpy", "__array__"})


def _has_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    given = (*args, *(value for name, value in kwargs.items() if name != "input"))
    return any(isinstance(value, torch.Tensor) for value in given)


class _Recorder(DispatchMode):
    def __init__(self, inputs: list[torch.Tensor], origin: Callable[[], str]) -> None:
        super().__init__()
        self.origin = origin
        self.names: Any = WeakTensorKeyDictionary()
        self.count = 0
        self.foreign: dict[str, torch.Tensor] = {}
        # for each storage: the name of its last flat view, and its offset
        self.flat: dict[int, tuple[str, int]] = {}
        self.problem: NotReplayable | None = None
        self.layouts: dict[str, Layout] = {}
        self.recording = Recording(tuple(self._name(tensor) for tensor in inputs))

    def _name(self, tensor: torch.Tensor) -> str:
        name = f"%{self.count}"
        self.count += 1
        self.names[tensor] = name
        self.layouts[name] = _layout(tensor)
        return name

    def _ref(self, tensor: torch.Tensor) -> Ref:
        name = self.names.get(tensor)
        if name is None:
            name = self._name(tensor)
            self.foreign[name] = tensor
        return Ref(name)

    def _value(self, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, Ref)):
            return value if isinstance(value, Ref) else self._ref(value)
        if isinstance(value, (list, tuple)):
            return tuple(self._value(item) for item in value)
        return value

    def _arguments(self, operator: Any, values: list[Any]) -> tuple[Any, ...]:
        """``set_`` from a storage is written as ``set_`` from the flat view that stands for it."""
        storage = values[1] if len(values) > 1 else None
        if isinstance(storage, torch.UntypedStorage):
            flat = self.flat.get(storage._cdata)
            if operator is not SET_STORAGE or flat is None:
                raise NotReplayable("a storage that no flat view names")
            values = [values[0], Ref(flat[0]), values[2] - flat[1], *values[3:]]
        return tuple(self._value(value) for value in values)

    def _outputs(self, result: Any, operator: Any) -> tuple[str | tuple[str, ...] | None, ...]:
        results = result if len(operator._schema.returns) > 1 else (result,)
        found: list[str | tuple[str, ...] | None] = []
        for item in results:
            if isinstance(item, torch.Tensor):
                found.append(self._name(item))
            elif isinstance(item, (list, tuple)):
                found.append(tuple(self._name(part) for part in item))
            else:
                found.append(None)
        if found and all(name is None for name in found):
            raise NotReplayable(f"{operator} gives no tensor")
        return tuple(found)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.problem is None and not isinstance(func, torch._ops.OpOverload):
            self.problem = NotReplayable(f"{func} is no single operator")
        if self.problem is not None:
            return func(*args, **(kwargs or {}))
        try:
            values = _positional(func, args, kwargs or {})
            arguments = self._arguments(func, values)
        except NotReplayable as problem:
            self.problem, arguments = problem, ()
        if self.problem is None and _counts_values(func, values):
            self.problem = NotReplayable(f"the values of a tensor say how long {func} is")
        result = func(*args, **(kwargs or {}))
        if self.problem is None:
            self._note(func, arguments, result)
        return result

    def _note(self, operator: Any, arguments: tuple[Any, ...], result: Any) -> None:
        try:
            call = Call(operator, arguments, self._outputs(result, operator), self.origin())
        except NotReplayable as problem:
            reads = (isinstance(leaf, Ref) for leaf in tree_flatten(arguments)[0])
            # a call that reads no tensor gives a constant, and is no problem
            self.problem = problem if any(reads) else None
            return
        self.recording.calls.append(call)
        if operator is AS_STRIDED and result.dim() == 1:
            place = (str(call.outputs[0]), result.storage_offset())
            self.flat[result.untyped_storage()._cdata] = place

    def finish(self, result: Any, constants: Iterable[torch.Tensor]) -> Recording:
        """The recording; raises ``NotReplayable``."""
        if self.problem is not None:
            raise self.problem
        leaves, structure = tree_flatten(result)
        named = [self._ref(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        known = {id(tensor) for tensor in constants}
        for name, tensor in self.foreign.items():
            if id(tensor) not in known:
                raise NotReplayable(f"a tensor of shape {tuple(tensor.shape)} made outside torch")
            self.recording.constants[name] = tensor
        self.recording.result = tree_unflatten(named, structure)
        self.recording.layouts = self.layouts
        return self.recording


def _counts_values(operator: Any, values: list[Any]) -> bool:
    """Whether values decide about the shape of a result. Of an index only masks do."""
    if torch.Tag.dynamic_output_shape not in operator.tags:
        return False
    if operator is not INDEX:
        return True
    return any(index is not None and index.dtype in _MASKS for index in values[1])


_MASKS = (torch.bool, torch.uint8)


def _layout(tensor: torch.Tensor) -> Layout:
    if tensor.layout is not torch.strided:
        return Layout((), (), None, tensor.dtype)
    per_tensor = tensor.is_quantized and tensor.qscheme() == torch.per_tensor_affine
    qparams = (tensor.q_scale(), tensor.q_zero_point()) if per_tensor else None
    return Layout(tuple(tensor.size()), tuple(tensor.stride()), qparams, tensor.dtype)


def _positional(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """All arguments in the order of the schema, defaults filled in."""
    found = []
    for index, argument in enumerate(operator._schema.arguments):
        if index < len(args):
            found.append(args[index])
        elif argument.name in kwargs:
            found.append(kwargs[argument.name])
        elif argument.has_default_value():
            found.append(argument.default_value)
        else:
            found.append(None)
    return found


# Modules of torch that ask whether their arguments override torch's functions, while a call is recorded.
#
# ``nn.MultiheadAttention`` and the transformer layers compute all as one operator, unless an argument
# overrides torch's functions; ``torch.overrides.has_torch_function`` says that of any argument below a
# function mode, as that of a recording is. They would record other operators than they run, of which the
# last bits differ.

_RECORDED = (torch.Tensor, nn.Parameter, type(None))
_original = torch.overrides.has_torch_function
_recording: set[int] = set()  # ids of threads that are recording
_lock = threading.Lock()


@contextmanager
def as_without_modes() -> Iterator[None]:
    """In this thread plain tensors override no function, whatever modes are on; other threads see no
    change.

    >>> class Mode(torch.overrides.TorchFunctionMode):
    ...     def __torch_function__(self, func, types, args=(), kwargs=None):
    ...         return func(*args, **(kwargs or {}))
    >>> with Mode():
    ...     before = torch.overrides.has_torch_function((torch.ones(1),))
    ...     with as_without_modes():
    ...         before, torch.overrides.has_torch_function((torch.ones(1),))
    (True, False)
    """
    here = threading.get_ident()
    if here in _recording:
        yield
        return
    with _lock:
        _recording.add(here)
        torch.overrides.has_torch_function = _answer
    try:
        yield
    finally:
        with _lock:
            _recording.remove(here)
            if not _recording:
                torch.overrides.has_torch_function = _original


def _answer(args: Iterable[Any]) -> bool:
    given = tuple(args)
    if threading.get_ident() in _recording and all(type(each) in _RECORDED for each in given):
        return False
    return bool(_original(given))
