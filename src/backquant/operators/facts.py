"""What is known of one use of an operator: reads the quantities that conditions name off a graph.

The names stand in ``backquant.backend_config.conditions.expressions``. What a module, an argument, or a
weight of the model says needs no example inputs; shapes of activations do.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

from torch import Tensor, dtype, fx
from torch._ops import OpOverload

from backquant.backend_config.conditions.expressions import (
    OPERATOR,
    SUBJECTS,
    TENSOR,
    Quantity,
    subject_of,
)
from backquant.backend_config.conditions.vocabulary import names_of
from backquant.graph import GraphIndex
from backquant.graph.arguments import Argument, argument_named, defaults_of
from backquant.graph.shapes import GraphValues, TensorFacts
from backquant.operators.index import find, find_root
from backquant.operators.operator import Operator


@dataclass(frozen=True)
class Unknown:
    """Why a quantity has no value here, and what would help."""

    why: str
    fix: str = ""


Values: TypeAlias = tuple[Any, ...]
_NO_EXAMPLE = "give example inputs: explain or quantize(model, example_inputs)"


@dataclass(frozen=True)
class UseFacts:
    """One match: its first operator, its last, and the others by the names that conditions use.

    ``sums`` gives the sums of absolute quantized weights of a node, or ``None`` if its weight is not
    quantized as asked. ``group_size``: that of the weight, as asked. ``swapped``: of two operands in any
    order, the second is called ``input``.
    """

    graph: GraphIndex
    values: GraphValues
    root: fx.Node
    anchor: fx.Node
    parts: Mapping[str, fx.Node] = field(default_factory=dict)
    sums: Callable[[Tensor, int], Values | None] = lambda *_: None
    group_size: int | None = None
    swapped: bool = False

    def orders(self) -> tuple[UseFacts, ...]:
        """The use with its operands in each order that computes the same.

        >>> gm = fx.symbolic_trace(lambda x: 2 * x)
        >>> node = list(gm.graph.nodes)[1]
        >>> uses = UseFacts(GraphIndex(gm), GraphValues(None), node, node).orders()
        >>> [use.read(Quantity("constant", "other")) for use in uses]
        [(False,), (True,)]
        """
        known = self._operator(self.root) if self.root.op.startswith("call") else None
        free = known is not None and known.commutative
        return (self, replace(self, swapped=True)) if free else (self,)

    def read(self, quantity: Quantity) -> Values | Unknown:
        """The values of a quantity.

        >>> from torch import nn
        >>> conv = fx.symbolic_trace(nn.Sequential(nn.Conv2d(4, 8, (3, 5), groups=2)))
        >>> node = list(conv.graph.nodes)[1]
        >>> use = UseFacts(GraphIndex(conv), GraphValues(None), node, node)
        >>> use.read(Quantity("kernel_width")), use.read(Quantity("in_channels"))
        ((5,), (4,))
        >>> use.read(Quantity("height", "output")).why
        'the shape of the output is not known: no example inputs'
        """
        name, subject = quantity.name, quantity.subject
        if name in TENSOR and (not subject or subject in SUBJECTS):
            return self._of_tensors(name, subject or subject_of(name))
        if subject in self.parts:
            part = self.parts[subject]
            if name in TENSOR:
                return _tensor_quantity(name, [self._facts(part)], subject)
            return self._of_operator(name, part)
        nodes = [self.root, *(n for n in self.parts.values() if n is not self.root)]
        found = (self._of_operator(name, node) for node in nodes if node.op != "placeholder")
        first: Values | Unknown = Unknown(f"no {name} here")
        for index, value in enumerate(found):
            if not isinstance(value, Unknown):
                return value
            first = value if index == 0 else first
        return first

    def weight_shape(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The shape of the weight, and what its axes are called; empty where it is not known."""
        weight, module = self._weight(self.root), self.graph.module_of(self.root)
        shape = () if weight is None else tuple(weight.shape)
        known = self._operator(self.root)
        if known is None or len(shape) != 2:
            return shape, ()
        if known.family == "embedding":
            return shape, ("num_embeddings", "embedding_dim")
        names = ("in_features", "out_features")
        across = module is None and known.weight_channel_axis == 1
        return shape, names if across else names[::-1]

    def weight_dtype(self) -> dtype | None:
        """What the weight is stored in, where that is known. None is computed: in training that may change
        what it is computed from (spectral norm)."""
        module = self.graph.module_of(self.root)
        held = (self._weight(self.root),) if module is None else module.parameters()
        return next((one.dtype for one in held if one is not None and len(one.shape) > 1), None)

    def row_shape(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The last axis of what a linear layer reads, as ``weight_shape`` gives it."""
        shape, names = self.weight_shape()
        axis = names.index("in_features") if "in_features" in names else None
        return ((), ()) if axis is None else (shape[axis : axis + 1], names[axis : axis + 1])

    # -- operators -------------------------------------------------------------------------------

    def _of_operator(self, name: str, node: fx.Node) -> Values | Unknown:
        if name == "weight_sums":
            return self._weight_sums(node)
        if name == "group_size":
            unknown = Unknown("the weight is not asked for in groups")
            return unknown if self.group_size is None else (self.group_size,)
        if name in ("dim", "axis"):
            return self._dim(node)
        if name in ("reads", "read_by"):
            return self._neighbours(name, node)
        if name in ("in_channels", "out_channels"):
            return self._channels(name, node)
        if name == "groups":
            return self._groups(node)
        if name in OPERATOR:
            return self._of_axes(name, node)
        value = self._parameter(name, node)
        if isinstance(value, Unknown):
            return value
        return (tuple(value) if isinstance(value, list) else value,)

    def _parameter(self, name: str, node: fx.Node) -> Any:
        """The value of a parameter by any of its names; where this spelling of the operator has none, the
        default of another spelling: ``operator.add`` has an ``alpha`` of 1."""
        module = self.graph.module_of(node)
        found = [
            Argument(getattr(part, each))
            for each in (names_of(name) if module is not None else ())
            for part in module.modules()  # type: ignore[union-attr]
            if hasattr(part, each)
        ]
        if module is None:
            given = (argument_named(node, each) for each in names_of(name))
            found = [each for each in given if each is not None]
        found += _default_of(self._operator(node), name) if not found else ()
        if not found:
            called = _called(node) if module is None else type(module).__name__
            return Unknown(f"{called} has no {'parameter ' if module is None else ''}{name}")
        value = next((each.value for each in found if each.value is not None), None)
        return Unknown(f"{name} is computed by the model") if isinstance(value, fx.Node) else value

    def _neighbours(self, name: str, node: fx.Node) -> Values:
        """The names of the operators before, or of those after; dropout is looked through."""
        forward = name == "read_by"
        pending = list(self.anchor.users if forward else self._inputs())
        if node not in (self.root, self.anchor):
            pending = list(node.users if forward else self._read_by(node))
        found: dict[str, None] = {}
        while pending:
            each = pending.pop(0)
            if not isinstance(each, fx.Node) or (
                forward and each.op != "output" and self.graph.has_no_tensors(each)
            ):
                continue
            known = self._operator(each) if each.op.startswith("call") else None
            if each.target is operator.getitem or (known is not None and known.family == "dropout"):
                pending += list(each.users) if forward else each.all_input_nodes
            else:
                found[_END.get(each.op) or (_called(each) if known is None else known.name)] = None
        return tuple(found)

    def _of_axes(self, name: str, node: fx.Node) -> Values | Unknown:
        base, axis = _base_and_axis(name)
        values = self._per_axis(base, node)
        if isinstance(values, Unknown) or axis is None:
            return values
        if len(values) < axis:
            return Unknown(f"{base} has {len(values)} {'axis' if len(values) == 1 else 'axes'}")
        return (values[-axis],)

    def _per_axis(self, name: str, node: fx.Node) -> Values | Unknown:
        if name == "kernel_size" and _is_weighted_call(node):
            weight = self._weight(node)
            unknown = Unknown("the shape of the weight is not known", _NO_EXAMPLE)
            return unknown if weight is None else tuple(weight.shape[2:])
        value = self._parameter(name, node)
        if isinstance(value, Unknown):
            return value
        if name == "stride" and value in (None, [], ()):  # of poolings
            return self._per_axis("kernel_size", node)
        if name == "padding" and isinstance(value, str):
            return self._named_padding(value, node)
        if isinstance(value, int):
            return (value,) * self._axes(node)
        if isinstance(value, (tuple, list)) and all(isinstance(each, int) for each in value):
            return tuple(value) * (self._axes(node) if len(value) == 1 else 1)
        return Unknown(f"{name} is {value!r}")

    def _named_padding(self, word: str, node: fx.Node) -> Values | Unknown:
        kernel, dilation = (self._per_axis(name, node) for name in ("kernel_size", "dilation"))
        if isinstance(kernel, Unknown) or isinstance(dilation, Unknown):
            return Unknown(f"padding is {word!r}")
        if word == "valid":
            return (0,) * len(kernel)
        return tuple(d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True))

    def _axes(self, node: fx.Node) -> int:
        """Axes of space of a convolution or pooling, by its name: ``max_pool2d`` has 2."""
        known = self._operator(node)
        named = re.search(r"([123])d", known.name if known is not None else _called(node))
        return int(named[1]) if named else 1

    def _operator(self, node: fx.Node) -> Operator | None:
        module = self.graph.module_of(node)
        if module is None:
            return find(node.target)
        found = (find_root(type(part)) for part in module.modules())
        return next((each for each in found if each is not None), None)

    def _groups(self, node: fx.Node) -> Values | Unknown:
        value = self._parameter("groups", node)
        known = self._operator(node)
        if isinstance(value, Unknown) and known is not None and known.is_weighted:
            return (1,)
        return value if isinstance(value, Unknown) else (value,)

    def _channels(self, name: str, node: fx.Node) -> Values | Unknown:
        weight, known = self._weight(node), self._operator(node)
        if known is None or not known.is_weighted:
            return Unknown(f"{_called(node)} has no {name}")
        module = self.graph.module_of(node)
        for part in () if module is None else module.modules():
            for own in (name, name.replace("channels", "features")):
                if isinstance(getattr(part, own, None), int):
                    return (getattr(part, own),)
        if weight is None:
            return Unknown("the shape of the weight is not known", _NO_EXAMPLE)
        groups = self._groups(node)
        count = 1 if isinstance(groups, Unknown) else groups[0]
        across = known.weight_channel_axis == 1  # [in, out / groups]
        first, second = weight.shape[0], weight.shape[1]
        given, read = (second * count, first) if across else (first, second * count)
        return (given,) if name == "out_channels" else (read,)

    def _dim(self, node: fx.Node) -> Values | Unknown:
        value = self._parameter("dim", node)
        if isinstance(value, Unknown):
            return value
        axes = tuple(sorted((value,) if isinstance(value, int) else value or ()))
        facts = next((self._facts(each) for each in self._read_by(node)), None)
        if isinstance(facts, TensorFacts) and all(isinstance(axis, int) for axis in axes):
            rank = len(facts.shape)
            if value is None:
                axes = tuple(range(rank))
            axes = tuple(sorted(axis - rank if axis >= 0 else axis for axis in axes))
        elif value is None:
            return ("all axes",)
        return (axes if isinstance(value, (tuple, list)) or value is None else axes[0],)

    def _weight_sums(self, node: fx.Node) -> Values | Unknown:
        weight, known = self._weight(node), self._operator(node)
        if not isinstance(weight, Tensor) or known is None or not known.is_weighted:
            return Unknown("the weight does not belong to the model")
        sums = self.sums(weight, known.weight_channel_axis or 0)
        return Unknown("no weight observer is asked for") if sums is None else sums

    def _weight(self, node: fx.Node) -> Tensor | TensorFacts | None:
        """The weight itself where the model holds it, else its shape if it is known."""
        module = self.graph.module_of(node)
        if module is not None:
            weights = (getattr(part, "weight", None) for part in module.modules())
            return next((w for w in weights if isinstance(w, Tensor) and w.dim() > 1), None)
        place = self._place("weight", node)
        return None if place is None else self._tensor(place)

    def _place(self, role: str, node: fx.Node) -> fx.Node | None:
        """The node that a function reads as its weight or bias."""
        found = argument_named(node, role)
        value = None if found is None else found.value
        if not isinstance(value, fx.Node):
            known = find(node.target)
            index = None if known is None else getattr(known, f"{role}_index")
            value = node.args[index] if index is not None and index < len(node.args) else None
        return value if isinstance(value, fx.Node) else None

    def _tensor(self, node: fx.Node) -> Tensor | TensorFacts | None:
        if node.op == "get_attr":
            path, _, name = str(node.target).rpartition(".")
            stored = getattr(self.graph.modules.get(path), name, None)
            if isinstance(stored, Tensor):
                return stored
        return self.values.of(node.name)

    # -- tensors ---------------------------------------------------------------------------------

    def _of_tensors(self, name: str, subject: str) -> Values | Unknown:
        if subject in ("weight", "bias"):
            return self._of_parameter(name, subject)
        nodes: list[Any] = []
        if subject in ("inputs", "tensors"):
            nodes += self._inputs()
        elif subject in ("input", "other"):
            read = self._read_by(self.root, with_numbers=True)
            place = int((subject == "other") != self.swapped)
            if len(read) <= place:
                return Unknown(f"there is no {subject}")
            nodes.append(read[place])
        if subject in ("output", "tensors"):
            nodes += self._results()
        if name == "constant":
            return tuple(_is_constant(node) for node in nodes)
        return _tensor_quantity(name, [self._facts(node) for node in nodes], subject)

    def _of_parameter(self, name: str, role: str) -> Values | Unknown:
        node = self.root
        module = self.graph.module_of(node)
        value: Tensor | TensorFacts | None
        if module is not None:
            held = (getattr(part, role, None) for part in module.modules())
            value = next((each for each in held if isinstance(each, Tensor)), None)
            place = None
        else:
            place = self._place(role, node)
            value = None if place is None else self._tensor(place)
        if name == "constant":
            return (place is None or place.op == "get_attr",)
        return _tensor_quantity(name, [value], role)

    def _facts(self, node: object) -> Any:
        return self._tensor(node) if isinstance(node, fx.Node) else node

    def _read_by(self, node: fx.Node, *, with_numbers: bool = False) -> list[Any]:
        """The activations that a node reads, in order; with the plain numbers among them."""
        is_function = self.graph.module_of(node) is None
        roles = {self._place(role, node) for role in ("weight", "bias")} if is_function else set()
        known = find(node.target) if is_function else None
        numbers = with_numbers and known is not None and known.family == "elementwise"
        return [
            value
            for value in _flat((*node.args, *node.kwargs.values()))
            if (isinstance(value, fx.Node) and value not in roles and self._is_tensor(value))
            or (numbers and isinstance(value, (int, float)) and not isinstance(value, bool))
        ]

    def _is_tensor(self, node: fx.Node) -> bool:
        return not self.graph.has_no_tensors(node)

    def _results(self) -> list[fx.Node]:
        """What the match gives: of a list of tensors the items that are read."""
        known = find(self.anchor.target)
        if known is None or not known.gives_items:
            return [self.anchor]
        return [user for user in self.anchor.users if user.target is operator.getitem]

    def _inputs(self) -> list[Any]:
        """What the operators of the match read from outside."""
        members = dict.fromkeys([self.root, *self.parts.values(), self.anchor])
        inside = [node for node in members if node.op != "placeholder" or node is self.root]
        found = (value for node in inside for value in self._read_by(node))
        return list(dict.fromkeys(value for value in found if value not in inside))


def _base_and_axis(name: str) -> tuple[str, int | None]:
    """``stride_height`` → ``stride``, the last axis but one."""
    for place, axis in enumerate(("width", "height", "depth"), start=1):
        if name.endswith(f"_{axis}"):
            base = name.removesuffix(f"_{axis}")
            return ("kernel_size" if base == "kernel" else base), place
    return name, None


def _is_weighted_call(node: fx.Node) -> bool:
    known = find(node.target) if node.op == "call_function" else None
    return known is not None and known.is_weighted


_END = {"output": "output", "placeholder": "input", "get_attr": "constant"}


@lru_cache(maxsize=4096)
def _default_of(known: Operator | None, name: str) -> tuple[Argument, ...]:
    """The default of a parameter in the first spelling that has one; not whether there are weights."""
    if known is None or name in ("weight", "bias", "affine", "elementwise_affine"):
        return ()
    for spelling in known.spellings:
        if isinstance(spelling, OpOverload):
            arguments = spelling._schema.arguments
            found = {a.name: a.default_value for a in arguments if a.has_default_value()}
        else:
            found = defaults_of(spelling)
        values = [Argument(found[each]) for each in names_of(name) if each in found]
        if values:
            return (values[0],)
    return ()


def _called(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value


def _is_constant(node: object) -> bool:
    """A tensor of the model, or a number."""
    return not isinstance(node, fx.Node) or node.op == "get_attr"


def _tensor_quantity(name: str, tensors: list[Any], subject: str) -> Values | Unknown:
    values: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            return Unknown(
                f"the shape of the {subject} is not known: no example inputs", _NO_EXAMPLE
            )
        shape = tuple(getattr(tensor, "shape", ()))  # a plain number has none
        found = _of_shape(name, shape)
        if name == "shape":
            found = ("dynamic" if getattr(tensor, "free", ()) else "static",)
        elif name == "dtype":
            dtype = getattr(tensor, "dtype", type(tensor).__name__)
            found = (str(dtype).removeprefix("torch."),)
        if found is None:
            return Unknown(f"the {subject} has no {name}: its shape is {shape}")
        values.extend(found)
    return tuple(values)


_PLACES = {"width": -1, "height": -2, "depth": -3, "channels": 1}


def _of_shape(name: str, shape: tuple[int, ...]) -> Values | None:
    if name in _PLACES:
        place = _PLACES[name]
        fits = len(shape) > place if place >= 0 else len(shape) >= -place
        return (shape[place],) if fits else None
    if name == "batch":
        return (shape[0] if len(shape) > 1 else 1,)
    if name == "rank":
        return (len(shape),)
    return (prod(shape),) if name == "elements" else shape
