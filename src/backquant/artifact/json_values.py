"""Arguments and attributes as JSON, and back: every value is a scalar, a list, or a tagged object.

Tags: ``node``, ``tensor``, ``tuple``, ``size``, ``namedtuple``, ``dict``, ``ordered_dict``, ``set``,
``slice``, ``range``, ``float`` (infinite or NaN), ``complex``, ``dtype``, ``device``, ``layout``,
``memory_format``, ``qscheme``, ``function``, ``class``, ``partial``, ``instance``, ``ellipsis``.

Invariant: a value comes back equal and of the same type, or is refused by name. Lists and dicts of
``torch.fx`` (which cannot be changed) come back as plain ones; ``torch.fx`` makes them its own again.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx.immutable_collections import immutable_dict, immutable_list

from backquant.artifact.functions import find_function, function_path, is_within
from backquant.artifact.labels import class_path, find_class, storable_path
from backquant.artifact.tensors import TensorReader
from backquant.errors import ArtifactError

_words = re.compile(r"\w+").findall
# Functions that may be values: the activations that modules of ``torch.nn`` keep as attributes.
VALUES = frozenset(
    f"{home}.{name}"
    for home in ("torch", "torch.nn.functional", "torch._C._nn")
    for name in _words(
        "celu elu gelu glu hardsigmoid hardswish hardtanh leaky_relu log_softmax logsigmoid mish relu relu6 "
        "rrelu selu sigmoid silu softmax softplus softsign tanh tanhshrink"
    )
)
_QSCHEMES = {
    str(scheme): scheme
    for scheme in (
        torch.per_tensor_affine,
        torch.per_tensor_symmetric,
        torch.per_channel_affine,
        torch.per_channel_symmetric,
        torch.per_channel_affine_float_qparams,
    )
}
_CONSTANTS: dict[type, str] = {
    torch.dtype: "dtype",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d{1,3})?")
_DEEPEST = 64
_SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "size"}
_DICTS: dict[type, str] = {dict: "dict", immutable_dict: "dict", OrderedDict: "ordered_dict"}


def is_plain(cls: type, allow: Sequence[str] = ()) -> bool:
    """Whether instances of a class of the packages ``allow`` are their attributes and nothing else, such as
    the configurations that modules keep.

    >>> class Config: pass
    >>> is_plain(Config, (Config.__module__,)), is_plain(Config), is_plain(Enum, ("enum",))
    (True, False, False)
    """
    if not is_within(class_path(cls), allow) or issubclass(cls, (nn.Module, Enum, BaseException)):
        return False
    is_object = cls.__new__ is object.__new__ and cls.__basicsize__ <= _Attributes.__basicsize__
    changed = ("__reduce__", "__reduce_ex__", "__setstate__", "__getstate__")
    kept = all(getattr(cls, name, None) is getattr(object, name, None) for name in changed)
    return is_object and kept and cls.__dictoffset__ != 0


def check_partial(value: partial[Any], allow: Sequence[str], where: str) -> None:
    """Functions and classes of torch are given plain values by name alone, no tensor to write to; a class
    needs a package that is allowed, whose code calls it. Raises ``ArtifactError``.

    >>> check_partial(partial(nn.functional.gelu, approximate="tanh"), (), "act")
    >>> check_partial(partial(nn.LayerNorm, eps=1e-6), (), "norm")
    Traceback (most recent call last):
    backquant.errors.ArtifactError: a functools.partial of LayerNorm cannot be stored with these arguments
      where  norm
      fix    call it in forward(), or pass allow=("package",), of the module, to save and to load
    """
    if is_within(class_path(value.func), allow):  # type: ignore[arg-type]
        return
    plain = (bool, int, float, str, type(None), torch.dtype)
    fits = not value.args and all(isinstance(given, plain) for given in value.keywords.values())
    if fits and not (isinstance(value.func, type) and not allow):
        return
    raise ArtifactError(
        f"a functools.partial of {value.func.__name__} cannot be stored with these arguments",
        where=where,
        fix='call it in forward(), or pass allow=("package",), of the module, to save and to load',
    )


class _Attributes:
    """A class whose instances have attributes and no slots."""


class Encoder:
    """Writes values; tensors go through ``store``, which returns their key."""

    def __init__(self, store: Callable[[torch.Tensor], str], allow: Sequence[str] = ()) -> None:
        self._store = store
        self.allow = tuple(allow)
        self._open: list[Any] = []  # the instances that what is encoded lies in

    def encode(self, value: Any, where: str) -> Any:
        """JSON form of ``value``; raises ``ArtifactError`` naming ``where`` for what has none.

        >>> Encoder(lambda tensor: "t0").encode([1, (2.5, None), slice(1, None)], "here")
        [1, {'tuple': [2.5, None]}, {'slice': [1, None, None]}]
        """
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind in (list, immutable_list):
            return self._each(value, where)
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: self._each(value, where)}
        if kind in _DICTS:
            return {_DICTS[kind]: [self._each(pair, where) for pair in value.items()]}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value, where)}
        return self._constant(value, where)

    def _each(self, values: Any, where: str) -> list[Any]:
        return [self.encode(value, where) for value in values]

    def _tensor(self, tensor: torch.Tensor, where: str) -> str:
        try:
            return self._store(tensor)
        except ArtifactError as error:
            raise ArtifactError(error.what, where=where, fix=error.fix) from error

    def _constant(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind is Node:
            return {"node": value.name}
        if kind is complex:
            return {"complex": self._each((value.real, value.imag), where)}
        if kind in (slice, range):
            parts = (value.start, value.stop, value.step)
            return {kind.__name__: self._each(parts, where)}
        if kind is set:
            return {"set": sorted(self._each(value, where), key=repr)}
        if kind is torch.device:
            return {"device": str(value)}
        if value is Ellipsis:
            return {"ellipsis": True}
        if isinstance(value, torch.qscheme):
            return {"qscheme": str(value)}
        if kind in _CONSTANTS:
            return {_CONSTANTS[kind]: str(value).removeprefix("torch.")}
        return self._named(value, where)

    def _named(self, value: Any, where: str) -> Any:
        kind = type(value)
        if isinstance(value, type):
            return {"class": storable_path(value, where, self.allow)}
        if kind is partial and not vars(value):
            content = (value.func, list(value.args), value.keywords)
            encoded = self._each(content, where)
            check_partial(value, self.allow, where)
            return {"partial": encoded}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            path = storable_path(type(value), where, self.allow)
            return {"namedtuple": [path, *self._each(value, where)]}
        if callable(value) and value is not getattr and not isinstance(value, Enum):
            return {"function": self._function(value, where)}
        if is_plain(type(value), self.allow):
            return {"instance": self._instance(value, where)}
        fix = "use plain numbers, strings, tuples, lists, dicts, tensors and torch constants"
        package = type(value).__module__.partition(".")[0]
        if is_plain(type(value), (package,)):
            fix += f',\nor pass allow=("{package}",) to save and to load'
        raise ArtifactError(
            f"a value of type {class_path(type(value))} cannot be stored", where=where, fix=fix
        )

    def _instance(self, value: Any, where: str) -> list[Any]:
        path = storable_path(type(value), where, self.allow)
        if any(value is other for other in self._open):
            raise ArtifactError(
                f"a value of type {path} cannot be stored: it holds itself", where=where
            )
        self._open.append(value)
        attributes = self.encode(vars(value), where)
        self._open.pop()
        return [path, attributes]

    def _function(self, value: Callable[..., Any], where: str) -> str:
        path = function_path(value, self.allow)
        if path in VALUES or is_within(path, self.allow) or path in self.allow:
            return path
        raise ArtifactError(
            f"the function {path} is a value here, and cannot be stored as one",
            where=where,
            fix="call it in forward(), or use an activation of torch.nn.functional",
        )


class Decoder:
    """Reads what ``Encoder`` wrote; nodes and tensors are looked up in the given tables."""

    def __init__(
        self,
        tensors: TensorReader,
        nodes: dict[str, Node] | None = None,
        allow: Sequence[str] = (),
    ) -> None:
        self.tensors = tensors
        self._nodes = nodes if nodes is not None else {}
        self.allow = tuple(allow)

    def within(self, nodes: dict[str, Node]) -> Decoder:
        """A decoder of the same tensors for a graph whose nodes are ``nodes``."""
        return Decoder(self.tensors, nodes, self.allow)

    def decode(self, value: Any, depth: int = 0) -> Any:
        """Inverse of ``Encoder.encode``. Raises ``ArtifactError`` for what is not admitted.

        >>> Decoder(TensorReader({}, {})).decode([1, {"tuple": [2.5, None]}, {"slice": [1, None, None]}])
        [1, (2.5, None), slice(1, None, None)]
        """
        if isinstance(value, (list, dict)) and depth == 0:
            _check_depth(value)
        if isinstance(value, list):
            return [self.decode(item, 1) for item in value]
        if not isinstance(value, dict):
            return value
        if len(value) != 1:
            raise ArtifactError("a value has one kind", where=repr(value)[:80])
        ((tag, content),) = value.items()
        handler = getattr(self, f"_read_{tag}", None) if tag.isidentifier() else None
        if handler is None:
            raise ArtifactError(
                f"the kind of value {tag!r} is unknown",
                where=repr(value)[:80],
                fix="load it with the backquant that wrote it, or a newer one",
            )
        return handler(content)

    def _read_node(self, name: str) -> Node:
        if not isinstance(name, str) or name not in self._nodes:
            raise ArtifactError(f"there is no node {name!r} before this one", where=repr(name)[:80])
        return self._nodes[name]

    def _read_tensor(self, key: str) -> torch.Tensor:
        return self.tensors.get(key)

    def _read_tuple(self, items: list[Any]) -> tuple[Any, ...]:
        return tuple(self.decode(items, 1))

    def _read_size(self, items: list[Any]) -> torch.Size:
        return torch.Size(self.decode(items, 1))

    def _read_namedtuple(self, items: list[Any]) -> Any:
        path, *fields = items
        cls = find_class(path, self.allow)
        if not (issubclass(cls, tuple) and hasattr(cls, "_fields")):
            raise ArtifactError(f"{path} is no named tuple", where=path)
        return cls(*self.decode(fields, 1))

    def _read_instance(self, parts: list[Any]) -> Any:
        path, attributes = parts
        cls = find_class(path, self.allow)
        if not is_plain(cls, self.allow):
            raise ArtifactError(f"{path} is no class of plain attributes", where=path)
        made: Any = object.__new__(cls)
        vars(made).update(self.decode(attributes, 1))
        return made

    def _read_partial(self, parts: list[Any]) -> Any:
        function, args, keywords = self.decode(parts, 1)
        if not isinstance(function, type) and not hasattr(function, "__qualname__"):
            raise ArtifactError("what a partial calls is no function", where=repr(parts)[:80])
        if not isinstance(keywords, dict) or not all(isinstance(name, str) for name in keywords):
            raise ArtifactError("a partial has no keywords like these", where=repr(parts)[:80])
        made = partial(function, *args, **keywords)
        check_partial(made, self.allow, repr(parts)[:80])
        return made

    def _read_dict(self, pairs: list[list[Any]]) -> dict[Any, Any]:
        entries = [(self.decode(k, 1), self.decode(v, 1)) for k, v in pairs]
        made = dict(entries)
        if len(made) < len(entries):
            raise ArtifactError("a dict has a key twice", where=repr(pairs)[:80])
        return made

    def _read_ordered_dict(self, pairs: list[list[Any]]) -> OrderedDict[Any, Any]:
        return OrderedDict(self._read_dict(pairs))

    def _read_set(self, items: list[Any]) -> set[Any]:
        return set(self.decode(items, 1))

    def _read_slice(self, parts: list[Any]) -> slice:
        return slice(*self.decode(parts, 1))

    def _read_range(self, parts: list[int]) -> range:
        return range(*parts)

    def _read_float(self, text: str) -> float:
        return float(text)

    def _read_complex(self, parts: list[Any]) -> complex:
        return complex(*self.decode(parts, 1))

    def _read_device(self, text: str) -> torch.device:
        if not isinstance(text, str) or not _DEVICE.fullmatch(text):
            raise ArtifactError(f"{text!r} is no device of an artifact", where=repr(text)[:80])
        return torch.device(text)

    def _read_qscheme(self, text: str) -> torch.qscheme:
        return _QSCHEMES[text]

    def _read_ellipsis(self, _: bool) -> Any:
        return Ellipsis

    def _read_dtype(self, name: str) -> Any:
        return torch_constant(name, torch.dtype)

    def _read_layout(self, name: str) -> Any:
        if name != "strided":  # what checks the indices of sparse tensors is not called everywhere
            raise ArtifactError(f"tensors of layout {name!r} are none of an artifact", where=name)
        return torch.strided

    def _read_memory_format(self, name: str) -> Any:
        return torch_constant(name, torch.memory_format)

    def _read_class(self, path: str) -> Any:
        return find_class(path, self.allow)

    def _read_function(self, path: str) -> Any:
        # Calls are checked where they stand in a graph; a value is called with who knows what.
        if path not in VALUES and not is_within(path, self.allow) and path not in self.allow:
            raise ArtifactError(f"the function {path} is no value of an artifact", where=path)
        return find_function(path, self.allow)


def _check_depth(value: Any) -> None:
    """Refuse what is nested so deep that reading it would exhaust the stack."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > _DEEPEST:
            raise ArtifactError(
                f"a value is nested more than {_DEEPEST} deep", where="the document"
            )
        inner = (v.values() if isinstance(v, dict) else v for v in level)
        level = [item for items in inner for item in items if isinstance(item, (list, dict))]


def torch_constant(name: str, kind: type) -> Any:
    """``torch.<name>``, which must be a ``kind``; raises ``ArtifactError`` if it is not.

    >>> torch_constant("int8", torch.dtype)
    torch.int8
    """
    constant = getattr(torch, name, None)
    if not isinstance(constant, kind):
        raise ArtifactError(
            f"this build of torch has no {kind.__name__} {name!r}",
            where=name,
            fix="load the file with the torch version that its header names",
        )
    return constant
