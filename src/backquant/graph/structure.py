"""How a model is called and what it returns: the arguments and the output of an exported graph.

An exported graph takes tensors and returns tensors. The graph module that is lifted from it takes the
arguments of the model's ``forward`` and returns tensors in tuples, lists and dicts; an output class
(a dataclass, a ``ModelOutput``) is a dict there, and made again by ``Interface.restored``.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree

from backquant.errors import InputError
from backquant.graph.example import describe_value
from backquant.graph.fixed_data import Data, equal, leaves
from backquant.graph.objects import Shell, tensors_of


class OutputRecord(dict[str, Any]):
    """What a loaded model returns in place of a class of somebody else: items, attributes, positions.

    >>> record = OutputRecord(logits=1)
    >>> record["logits"], record.logits, record[0]
    (1, 1, 1)
    """

    def __getattribute__(self, name: str) -> Any:
        # an item may have the name of a method of dict, such as ``keys`` of a cache
        if not name.startswith("__") and dict.__contains__(self, name):
            return dict.__getitem__(self, name)
        return super().__getattribute__(name)

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, int):
            return list(dict.values(self))[key]
        return super().__getitem__(key)


_KINDS = {
    tuple: "tuple",
    list: "list",
    immutable_list: "list",
    dict: "dict",
    immutable_dict: "dict",
}


@dataclass(frozen=True)
class Structure:
    """A tree of ``"value"``, ``"tuple"``, ``"list"``, ``"dict"`` and ``"record"``.

    A record is an instance of a class: ``make(values)`` makes it from the values of its ``keys``.
    """

    kind: str
    keys: tuple[Any, ...] = ()
    parts: tuple[Structure, ...] = ()
    name: str = ""
    make: Callable[[list[Any]], Any] | None = None

    @classmethod
    def of(cls, spec: Any) -> Structure:
        """The structure of a pytree spec.

        >>> Structure.of(pytree.tree_structure({"a": (1, 2)})).keys
        ('a',)
        """
        if spec.is_leaf():
            return cls("value")
        parts = tuple(cls.of(child) for child in spec.children())
        kind = _KINDS.get(spec.type)
        if kind is None:
            keys, make = _keys(spec, len(parts)), Maker(spec.type, spec.context)
            return cls("record", keys, parts, _class_path(spec.type), make)
        return cls(kind, tuple(spec.context) if kind == "dict" else (), parts)

    @property
    def has_records(self) -> bool:
        """Whether a class has to be made again."""
        return self.kind == "record" or any(part.has_records for part in self.parts)

    def leaf_names(self, path: tuple[str, ...] = ()) -> Iterator[str]:
        """The keys to each leaf, joined by dots; empty where no key of a dict or record is among them.

        >>> list(Structure.of(pytree.tree_structure([1, {"a": 2, "b": (3, 4)}])).leaf_names())
        ['', '1.a', '1.b.0', '1.b.1']
        """
        if self.kind == "value":
            yield "" if all(map(str.isdecimal, path)) else ".".join(path)
        for number, part in enumerate(self.parts):
            yield from part.leaf_names((*path, str(self.keys[number] if self.keys else number)))

    def nested(self, leaves: list[Any]) -> Any:
        """The flat ``leaves`` (consumed from the front) in tuples, lists and dicts.

        >>> Structure.of(pytree.tree_structure([1, {"a": 2}])).nested([5, 6])
        [5, {'a': 6}]
        """
        if self.kind == "value":
            return leaves.pop(0)
        values = [part.nested(leaves) for part in self.parts]
        if self.kind in ("dict", "record"):
            return dict(zip(self.keys, values, strict=True))
        return tuple(values) if self.kind == "tuple" else values

    def restored(self, value: Any) -> Any:
        """``value``, as ``nested`` gives it, with records made again."""
        if not self.has_records:
            return value
        keyed = self.kind in ("dict", "record")
        inner = [value[key] for key in self.keys] if keyed else list(value)
        values = [part.restored(v) for part, v in zip(self.parts, inner, strict=True)]
        if self.kind == "record":
            if self.make is not None:
                return self.make(values)
            return OutputRecord(zip(self.keys, values, strict=True))
        if self.kind == "dict":
            return dict(zip(self.keys, values, strict=True))
        return tuple(values) if self.kind == "tuple" else values

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; the class of a record is kept by name only.

        >>> Structure("tuple", parts=(Structure("value"),)).to_dict()
        {'kind': 'tuple', 'parts': [{'kind': 'value'}]}
        """
        found: dict[str, Any] = {"kind": self.kind}
        if self.keys:
            found["keys"] = list(self.keys)
        if self.parts:
            found["parts"] = [part.to_dict() for part in self.parts]
        return {**found, "name": self.name} if self.name else found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Structure:
        """Inverse of ``to_dict``: records become ``OutputRecord``.

        >>> Structure.from_dict({"kind": "record", "keys": ["a"], "parts": [{"kind": "value"}]}
        ...                     ).restored({"a": 3}).a
        3
        """
        parts = tuple(cls.from_dict(part) for part in data.get("parts", ()))
        return cls(str(data["kind"]), tuple(data.get("keys", ())), parts, data.get("name", ""))


def _keys(spec: Any, count: int) -> tuple[Any, ...]:
    """The names of the parts of a registered class: those of its fields, where it tells them."""
    if spec.type is not None and hasattr(spec.type, "_fields"):  # a namedtuple
        return tuple(spec.type._fields)
    context = spec.context
    if isinstance(context, Shell):
        return context.names
    for candidate in (context, *(context if isinstance(context, (list, tuple)) else ())):
        names = candidate if isinstance(candidate, (list, tuple)) else ()
        if len(names) == count and all(isinstance(name, str) for name in names):
            return tuple(names)
    return tuple(f"item_{i}" for i in range(count))


def _class_path(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@dataclass(frozen=True)
class Maker:
    """Makes an instance of a class that is registered with ``torch.utils._pytree``, or of any other.

    >>> import types
    >>> Maker(types.SimpleNamespace, Shell(types.SimpleNamespace, ("a",)))([1])
    namespace(a=1)
    """

    cls: type
    context: Any

    def __call__(self, values: list[Any]) -> Any:
        if hasattr(self.cls, "_fields"):
            return self.cls(*values)
        if isinstance(self.context, Shell):
            return self.context.filled(values)
        return pytree.SUPPORTED_NODES[self.cls].unflatten_fn(values, self.context)


@dataclass(frozen=True)
class Argument:
    """One argument of the model.

    ``shapes``: for each tensor in it the size of each dimension (``None`` where any is accepted, and a
    name where all dimensions of that name must agree); ``dtypes``: the name of the dtype
    of each. Without tensors it is a constant, ``value``, that is part of the graph. ``fixed``: numbers and
    texts beside the tensors that are, by where they stand in the argument.
    """

    name: str
    shapes: tuple[tuple[int | str | None, ...], ...] = ()
    value: Any = None
    dtypes: tuple[str, ...] = ()
    fixed: Data = ()

    @property
    def is_constant(self) -> bool:
        """Whether it holds no tensor."""
        return not self.shapes

    @property
    def holds_floats(self) -> bool:
        """Whether one of its tensors does, as far as is known."""
        return not self.dtypes or any(getattr(torch, d).is_floating_point for d in self.dtypes)


@dataclass(frozen=True)
class Interface:
    """What an exported graph accepts, and the structure of what the model returned."""

    arguments: tuple[Argument, ...]
    output: Structure

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise ``InputError`` for arguments that the graph was not exported for.

        >>> interface = Interface((Argument("x", ((None, 3),)),), Structure("value"))
        >>> interface.check((torch.zeros(7, 3),), {})
        >>> interface.check((torch.zeros(7, 4),), {})
        Traceback (most recent call last):
        ...
        backquant.errors.InputError: dimension 1 of input 'x' is 4, and the model was exported for 3
          where  x: float32[7, 4], exported for [any, 3]
          fix    example inputs of the size that is used, or dynamic_shapes= with that dimension dynamic
        """
        names = [argument.name for argument in self.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        sizes: dict[str, tuple[int, str]] = {}
        for argument in self.arguments:
            _check_argument(argument, given.get(argument.name, _ABSENT), sizes)

    def restored(self, value: Any) -> Any:
        """The output of the graph as the model would return it."""
        return self.output.restored(value)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able. Constants that are no numbers, strings, booleans or None are left unchecked."""
        plain = (bool, int, float, str, type(None))
        arguments = [
            {
                "name": a.name,
                "shapes": [list(s) for s in a.shapes],
                "value": a.value,
                "dtypes": list(a.dtypes),
                **({"fixed": [list(item) for item in _writable(a.fixed)]} if a.fixed else {}),
            }
            for a in self.arguments
            if a.shapes or isinstance(a.value, plain)
        ]
        return {"arguments": arguments, "output": self.output.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Interface:
        """Inverse of ``to_dict``.

        >>> interface = Interface((Argument("x", ((None, 3),)),), Structure("value"))
        >>> Interface.from_dict(interface.to_dict()) == interface
        True
        """
        arguments = (
            Argument(
                str(a["name"]),
                tuple(tuple(s) for s in a["shapes"]),
                a["value"],
                tuple(map(str, a["dtypes"])),
                tuple((str(place), value) for place, value in a.get("fixed", ())),
            )
            for a in data["arguments"]
        )
        return cls(tuple(arguments), Structure.from_dict(data["output"]))


_ABSENT = object()


def _check_argument(argument: Argument, value: Any, sizes: dict[str, tuple[int, str]]) -> None:
    if argument.is_constant:
        if value is not _ABSENT and not _same(value, argument.value):
            raise InputError(
                f"input {argument.name!r} is {describe(value)}, and {describe(argument.value)} is part "
                "of the exported graph",
                where=f"{argument.name}={describe(value)}",
                fix=f"leave {argument.name!r} out, or pass it in the example inputs",
            )
        return
    tensors = tensors_of(value)
    if len(tensors) != len(argument.shapes):
        count = len(argument.shapes)
        known = "a tensor" if count == 1 else f"{count} tensors"
        raise InputError(
            f"input {argument.name!r} was {known} when the model was exported",
            where=f"{argument.name}: " + ("missing" if value is _ABSENT else describe(value)),
            fix=f"pass {argument.name!r} as in the example inputs",
        )
    for index, (tensor, shape) in enumerate(zip(tensors, argument.shapes, strict=True)):
        _check_shape(argument.name, tensor, shape, sizes)
        wanted = argument.dtypes[index] if argument.dtypes else ""
        if wanted and getattr(torch, wanted, None) != tensor.dtype:
            given = str(tensor.dtype).removeprefix("torch.")
            raise InputError(
                f"input {argument.name!r} is {given}, and the model was exported for {wanted}",
                where=f"{argument.name}: {describe_value(tensor)}",
                fix=f"{argument.name}.to(torch.{wanted})",
            )

    _check_fixed(argument, value)


def _check_fixed(argument: Argument, value: Any) -> None:
    found = {leaf.place: leaf.value for leaf in leaves(value)} if argument.fixed else {}
    for place, wanted in argument.fixed:
        given = found.get(place, _ABSENT)
        if given is _ABSENT or not equal(wanted, given):
            shown = "missing" if given is _ABSENT else describe(given)
            raise InputError(
                f"{argument.name}{place} is {shown}, and {describe(wanted)} is part of the exported graph",
                where=f"{argument.name}{place}: {shown}",
                fix=f"pass {describe(wanted)}; what varies has to be a tensor, in the example inputs, too",
            )


def _writable(data: Data) -> Data:
    """Without the numbers that JSON has not: of a model that is loaded they are not checked."""
    return tuple((p, v) for p, v in data if not isinstance(v, float) or math.isfinite(v))


def _check_shape(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | str | None, ...],
    sizes: dict[str, tuple[int, str]],
) -> None:
    if tensor.dim() != len(shape):
        raise InputError(
            f"input {name!r} has {tensor.dim()} dimensions, and the model was exported for {len(shape)}",
            where=_where(name, tensor, shape),
            fix="example inputs with the dimensions that are used",
        )
    for position, (size, wanted) in enumerate(zip(tensor.shape, shape, strict=True)):
        if wanted is None or size == wanted:
            continue
        place = f"dimension {position} of input {name!r}"
        if not isinstance(wanted, str):
            raise InputError(
                f"{place} is {size}, and the model was exported for {wanted}",
                where=_where(name, tensor, shape),
                fix="example inputs of the size that is used, or dynamic_shapes= with that dimension "
                "dynamic",
            )
        first = sizes.setdefault(wanted, (size, place))
        if first[0] != size:
            raise InputError(
                f"{place} is {size}, and {first[1]} is {first[0]}: they are the same size in this model",
                where=_where(name, tensor, shape),
                fix="pass inputs of equal size in these dimensions",
            )


def _where(name: str, tensor: torch.Tensor, shape: tuple[int | str | None, ...]) -> str:
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    return f"{name}: {describe_value(tensor)}, exported for [{sizes}]"


def describe(value: Any) -> str:
    """A short text for any argument."""
    return describe_value(value) if isinstance(value, torch.Tensor) else repr(value)[:60]


def _same(value: Any, constant: Any) -> bool:
    if tensors_of(value):
        return False
    try:
        return bool(value == constant)
    except Exception:  # a class of another package may raise anything
        return value is constant


#: What later steps have to know of a capture is in ``meta`` of the graph module, with which they carry it on.
INTERFACE = "backquant_interface"
_OUTPUT = "backquant_output"


def interface_of(module: Any) -> Interface | None:
    """The interface of a graph module that was exported; ``None`` for one that was traced.

    >>> interface_of(torch.nn.ReLU()) is None
    True
    """
    found = _kept(module, INTERFACE)
    return found if isinstance(found, Interface) else None


def output_of(module: Any) -> Structure | None:
    """The structure of what a traced model returned, where it holds classes.

    >>> output_of(torch.nn.ReLU()) is None
    True
    """
    found = _kept(module, _OUTPUT)
    return found if isinstance(found, Structure) else None


def _kept(module: Any, key: str) -> Any:
    meta = getattr(module, "meta", None)
    return meta.get(key) if isinstance(meta, dict) else None


# What a traced model returns, where ``torch.fx`` keeps no class: ordered dicts, dataclasses, output records.
#
# A trace returns tensors in tuples, lists and dicts. The classes around them are kept beside the graph, as
# those of an exported model are, and made again when the model was called.


def keep_returned(module: fx.GraphModule, returned: Any) -> None:
    """Note in ``module`` the classes in ``returned``, what tracing its model gave.

    >>> from backquant.graph.structure import output_of
    >>> graph_module = fx.symbolic_trace(lambda x: {"a": x})
    >>> keep_returned(graph_module, OrderedDict(a=None))
    >>> output_of(graph_module).restored({"a": 1})
    OrderedDict([('a', 1)])
    """
    structure = _structure(returned)
    if structure.has_records:
        module.meta[_OUTPUT] = structure


def dataclasses_as_dicts(graph: fx.Graph) -> None:
    """Calls of dataclasses in the output of ``graph`` become dicts of their arguments.

    >>> graph = fx.Graph()
    >>> made = graph.call_function(Shell, kwargs={"cls": graph.placeholder("x"), "names": (), "rest": {}})
    >>> _ = graph.output(made)
    >>> dataclasses_as_dicts(graph)
    >>> print(graph)
    graph():
        %x : [num_users=1] = placeholder[target=x]
        return {'cls': x, 'names': (), 'rest': {}}
    """
    output = graph.output_node()
    made = [node for node in output.all_input_nodes if _makes_dataclass(node)]
    if not made:
        return

    def plain(node: fx.Node) -> Any:
        return fx.node.map_arg(dict(node.kwargs), plain) if _makes_dataclass(node) else node

    output.args = fx.node.map_arg(output.args, plain)
    for node in reversed(graph.nodes):
        if _makes_dataclass(node) and not node.users:
            graph.erase_node(node)


def _makes_dataclass(node: fx.Node) -> bool:
    is_class = node.op == "call_function" and isinstance(node.target, type)
    return is_class and dataclasses.is_dataclass(node.target) and not node.args


def _structure(value: Any) -> Structure:
    kind = type(value)
    if kind in (tuple, list):
        return Structure(kind.__name__, (), tuple(map(_structure, value)))
    if not isinstance(value, dict) and not _is_dataclass(value):
        return Structure("value")
    items = dict(value) if isinstance(value, dict) else _fields(value)
    keys, parts = tuple(items), tuple(map(_structure, items.values()))
    if kind is OrderedDict or (kind in pytree.SUPPORTED_NODES and hasattr(value, "to_tuple")):
        make = Maker(kind, list(keys))
    elif _is_dataclass(value) and not isinstance(value, dict):
        make = Maker(kind, Shell(kind, keys))
    else:
        return Structure("dict", keys, parts)
    return Structure("record", keys, parts, _class_path(kind), make)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
