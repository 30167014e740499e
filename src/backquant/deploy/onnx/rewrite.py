"""The one rewriter of ONNX graphs.

A rule is a function of one node, listed under the operator that it is for. It returns the value that stands
for the node's from now on (a tuple for several), which it has written with ``OnnxCalls``; or ``None``: the
node stays, with other inputs perhaps. What nobody reads after a pass is removed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from backquant.deploy.onnx.exporter import ORIGIN

if TYPE_CHECKING:
    import onnx_ir as ir

Rule = Callable[[Any], Any]


def rewrite(model: Any, rules: Mapping[str, Rule]) -> None:
    """Apply each rule to every node of its operator, in graph order, in place.

    >>> import onnx_ir as ir
    >>> x = ir.Value(name="x")
    >>> relu = ir.node("Relu", [x], name="relu")
    >>> graph = ir.Graph([x], relu.outputs, nodes=[relu], opset_imports={"": 18})
    >>> model = ir.Model(graph, ir_version=10)
    >>> rewrite(model, {"Relu": lambda node: OnnxCalls(node).Max(x, OnnxCalls(node).constant(0.0, "least"))})
    >>> [node.name for node in graph], list(graph.initializers)
    (['relu/Max'], ['least_folded'])
    """
    for node in list(model.graph):
        rule = rules.get(node.op_type)
        made = None if rule is None else rule(node)
        if made is not None:
            replace(node, made)
    drop_unused(model)


def replace(node: ir.Node, made: Any) -> None:
    """Let readers of ``node`` read ``made``, a value or several, and remove it. Outputs keep their names."""
    for old, new in zip(node.outputs, made if isinstance(made, tuple) else (made,), strict=True):
        new.type = old.type if new.type is None else new.type
        new.shape = old.shape if new.shape is None else new.shape
        if old.is_graph_output():
            new.name, old.name = old.name, new.name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph_of(node).remove(node, safe=True)


def drop_unused(model: Any) -> None:
    """Remove nodes and constants that nothing reads, in place."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    RemoveUnusedNodesPass()(model)


#: The types of what some operators give; of the others, that of what they read.
_TYPES = {"MatMulInteger": "INT32", "Shape": "INT64", "DequantizeLinear": "FLOAT", "Cast": "FLOAT"}


@dataclass(frozen=True)
class OnnxCalls:
    """Writes nodes before ``node``, made for the same node of the reference graph:
    ``OnnxCalls(node).Mul(x, y)`` is the value of ``x * y``."""

    node: ir.Node

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        return partial(self.call, kind)

    def call(
        self, kind: str, *inputs: Any, domain: str = "", outputs: int = 1, **attributes: Any
    ) -> Any:
        """The value of a new node, or the values, where ``outputs`` are several."""
        import onnx_ir as ir

        node, graph = self.node, graph_of(self.node)
        name = self._free(f"{node.name}/{kind}")
        given = ir.convenience.convert_attributes(attributes)
        made = ir.Node(domain, kind, inputs, given, num_outputs=outputs, name=name)
        made.metadata_props.update(node.metadata_props)
        if domain:
            graph.opset_imports[domain] = 1
        for number, value in enumerate(made.outputs):
            value.name = f"{name}:{number}" if number else name
        if outputs > 1:
            graph.insert_before(node, made)
            return made.outputs
        if kind in _TYPES:
            made.outputs[0].type = ir.TensorType(ir.DataType[_TYPES[kind]])
        elif not domain:
            made.outputs[0].type = inputs[2 if kind == "QuantizeLinear" else 0].type
        graph.insert_before(node, made)
        return made.outputs[0]

    def again(self, *inputs: Any, **attributes: Any) -> Any:
        """The same call of other inputs, or with other ``attributes``."""
        node = self.node
        made = self.call(
            node.op_type, *(inputs or node.inputs), **{**node.attributes, **attributes}
        )
        made.type = node.outputs[0].type
        return made

    def constant(self, array: Any, like: str | None = None) -> Any:
        """A new constant of the graph, named after ``like``, or after the node."""
        import onnx_ir as ir

        array = np.asarray(array)
        name = self._free(f"{like or f'{self.node.name}/constant'}_folded")
        tensor = ir.Tensor(np.ascontiguousarray(array).reshape(array.shape), name=name)
        made = ir.Value(
            name=name,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        graph_of(self.node).register_initializer(made)
        return made

    def _free(self, name: str) -> str:
        """``name``, with a number where the rewriter gave it out before."""
        taken = graph_of(self.node).meta.setdefault("backquant.names", Counter())
        taken[name] += 1
        return name if taken[name] == 1 else f"{name}_{taken[name]}"


def array_of(value: Any) -> Any:
    """The array of a constant; ``None`` where ``value`` is none."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def graph_of(node: ir.Node) -> ir.Graph:
    """The graph of a node that has not been removed."""
    assert node.graph is not None
    return node.graph


def input_of(node: ir.Node, place: int) -> Any:
    """The input at ``place``; ``None`` where it is left out."""
    return node.inputs[place] if len(node.inputs) > place else None


def inputs_of(node: ir.Node) -> list[Any]:
    """All inputs, in order; ``None`` for those that are left out."""
    return list(node.inputs)


def comes_from(value: Any, kind: str) -> Any:
    """The node of operator ``kind`` that gives ``value``; ``None`` where another does."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == kind else None


def readers_of(node: ir.Node) -> list[Any]:
    """The nodes that read the first result of ``node``, once for each time."""
    return [use.node for use in node.outputs[0].uses()]


def only_reader(node: ir.Node, *kinds: str) -> Any:
    """The node, of one of these operators if any are named, that alone reads what ``node`` gives, which is no
    output of the model; ``None`` where there is no such node."""
    readers = readers_of(node)
    alone = len(readers) == 1 and not node.outputs[0].is_graph_output()
    return readers[0] if alone and (not kinds or readers[0].op_type in kinds) else None


# Outputs and axes of free size under the user's own names, in place of the exporter's ``s77``.


def name_outputs(model: Any, names: Sequence[str]) -> None:
    """Rename outputs of an ``onnx_ir.Model``, in place; an empty name, and that of an input, changes nothing.

    None is renamed where their number is another one than that of ``names``.
    """
    outputs = list(model.graph.outputs)
    if len(outputs) != len(names):
        return
    inside = [value for node in model.graph for value in node.outputs]
    taken = {value.name: value for value in (*inside, *model.graph.initializers.values())}
    fixed = {value.name for value in model.graph.inputs}
    for value, name in zip(outputs, names, strict=True):
        if not name or name in fixed:
            continue
        other = taken.pop(name, value)
        if other is not value:
            other.name = next(
                free for n in count(1) if (free := f"{name}_{n}") not in taken.keys() | fixed
            )
            taken[other.name] = other
        value.name = name
        fixed.add(name)


def name_axes(model: Any, dynamic_shapes: Any) -> None:
    """Rename the free sizes of an ``onnx_ir.Model``, in place, as ``dynamic_shapes`` calls them.

    Sizes that are computed from named ones (``2*s77``) are renamed, too.
    """
    names = dict(_labels(model.graph.inputs, dynamic_shapes))
    if not names:
        return
    symbols = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")
    values = [*model.graph.inputs, *model.graph.outputs]
    values += [value for node in model.graph for value in node.outputs]
    for value in values:
        if value.shape is not None:
            value.shape = _renamed(value.shape, symbols, names)


def _labels(inputs: Any, dynamic_shapes: Any) -> Iterator[tuple[str, str]]:
    """The exporter's name of each free size, and the user's."""
    if not isinstance(dynamic_shapes, Mapping):
        names = (value.name for value in inputs)
        dynamic_shapes = dict(zip(names, dynamic_shapes or (), strict=False))
    for value in inputs:
        axes = dynamic_shapes.get(value.name)
        for axis, label in axes.items() if isinstance(axes, Mapping) else ():
            name = getattr(label, "__name__", label)
            size = None if value.shape is None else getattr(value.shape[axis], "value", None)
            if isinstance(name, str) and isinstance(size, str):
                yield size, name.partition("<=")[0]


def _renamed(shape: Any, symbols: re.Pattern[str], names: Mapping[str, str]) -> Any:
    import onnx_ir as ir

    def size(dim: Any) -> Any:
        text = getattr(dim, "value", None)
        return symbols.sub(lambda m: names[m[0]], text) if isinstance(text, str) else dim

    return ir.Shape([size(dim) for dim in shape])


# Weights in groups: ``DequantizeLinear`` with ``block_size``, in the form that runtimes have kernels for.
#
# 1. Integers that fit into four bits are written as INT4 or UINT4, two to a byte (opset 21). Zero points of
#    zero are left out.
# 2. A weight that a matrix product reads has its groups along axis 0: ``[K, N]``, no Transpose behind it.
#
# Source: ONNX operator documentation, DequantizeLinear-21.


def is_blocked(node: ir.Node) -> bool:
    """Whether a node dequantizes a constant with one scale for each group."""
    return (
        node is not None
        and node.op_type == "DequantizeLinear"
        and "block_size" in node.attributes
        and input_of(node, 0).const_value is not None
    )


def is_plain(product: Any) -> bool:
    """Whether a product has no factors, and does not transpose its first operand."""
    attributes = product.attributes
    factors = [attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
    return factors == [1.0, 1.0] and not attributes.get_int("transA", 0)


def settle_blocks(model: Any) -> None:
    """Rewrite, in place, every weight in groups (rules 1 and 2)."""
    rewrite(model, {"Gemm": _as_matmul})
    rewrite(model, {"DequantizeLinear": lambda node: _narrow(node) if is_blocked(node) else None})


def narrow_constants(model: Any, origins: Collection[str]) -> None:
    """Apply rule 1, in place, to constants with one scale, or one for each channel, made for ``origins``."""

    def narrow(node: ir.Node) -> None:
        is_meant = node.metadata_props.get(ORIGIN) in origins
        if is_meant and all(value.const_value is not None for value in inputs_of(node)):
            _narrow(node)

    rewrite(model, {"DequantizeLinear": narrow})


def _as_matmul(node: ir.Node) -> Any:
    """``Gemm(x, w, b)`` as ``MatMul(x, w)`` and ``Add``: rule 2."""
    x, weight, bias = (input_of(node, place) for place in range(3))
    if not is_blocked(weight.producer()) or not is_plain(node):
        return None
    if node.attributes.get_int("transB", 0):
        weight = transposed_blocks(weight.producer(), [1, 0])
    product = OnnxCalls(node).MatMul(x, weight)
    product.shape = node.outputs[0].shape
    return product if bias is None else OnnxCalls(node).Add(product, bias)


def transposed_blocks(node: ir.Node, permutation: list[int]) -> Any:
    """What a dequantized constant in groups gives, transposed: the constants are."""
    import onnx_ir as ir

    write = OnnxCalls(node)
    arrays = [array_of(value).transpose(permutation) for value in node.inputs]
    axis = node.attributes["axis"].as_int() % len(permutation)
    made = write.again(
        *(
            write.constant(*pair)
            for pair in zip(arrays, (v.name for v in inputs_of(node)), strict=True)
        ),
        axis=permutation.index(axis),
    )
    made.shape = ir.Shape(arrays[0].shape)
    return made


def _narrow(node: ir.Node) -> None:
    """Rule 1."""
    import onnx_ir as ir

    if len(node.inputs) < 3:
        return
    weight, zero_point = (array_of(input_of(node, i)) for i in (0, 2))
    signed = weight.dtype == np.int8
    ends = (-8, 7) if signed else (0, 15)
    fits = all(a.size and ends[0] <= a.min() and a.max() <= ends[1] for a in (weight, zero_point))
    if fits:
        target = (ir.DataType.INT4 if signed else ir.DataType.UINT4).numpy()
        for place, array in ((0, weight), (2, zero_point)):
            name = str(input_of(node, place).name)
            node.replace_input_with(place, OnnxCalls(node).constant(array.astype(target), name))
    if not zero_point.any():
        node.resize_inputs(2)
