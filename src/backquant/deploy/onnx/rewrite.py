"""The one rewriter of ONNX graphs.

A rule is a function of one node, listed under the operator that it is for. It returns the value that stands
for the node's from now on (a tuple for several), which it has written with ``OnnxCalls``; or ``None``: the
node stays, with other inputs perhaps. What nobody reads after a pass is removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

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


def replace(node: Any, made: Any) -> None:
    """Let readers of ``node`` read ``made``, a value or several, and remove it. Outputs keep their names."""
    for old, new in zip(node.outputs, made if isinstance(made, tuple) else (made,), strict=True):
        new.type = old.type if new.type is None else new.type
        new.shape = old.shape if new.shape is None else new.shape
        if old.is_graph_output():
            new.name, old.name = old.name, new.name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    node.graph.remove(node, safe=True)


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

    node: Any

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        return partial(self.call, kind)

    def call(
        self, kind: str, *inputs: Any, domain: str = "", outputs: int = 1, **attributes: Any
    ) -> Any:
        """The value of a new node, or the values, where ``outputs`` are several."""
        import onnx_ir as ir

        node, graph = self.node, self.node.graph
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
        self.node.graph.register_initializer(made)
        return made

    def _free(self, name: str) -> str:
        """``name``, with a number where the rewriter gave it out before."""
        taken = self.node.graph.meta.setdefault("backquant.names", Counter())
        taken[name] += 1
        return name if taken[name] == 1 else f"{name}_{taken[name]}"


def array_of(value: Any) -> Any:
    """The array of a constant; ``None`` where ``value`` is none."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def input_of(node: Any, place: int) -> Any:
    """The input at ``place``; ``None`` where it is left out."""
    return node.inputs[place] if len(node.inputs) > place else None


def comes_from(value: Any, kind: str) -> Any:
    """The node of operator ``kind`` that gives ``value``; ``None`` where another does."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == kind else None


def readers_of(node: Any) -> list[Any]:
    """The nodes that read the first result of ``node``, once for each time."""
    return [use.node for use in node.outputs[0].uses()]


def only_reader(node: Any, *kinds: str) -> Any:
    """The node, of one of these operators if any are named, that alone reads what ``node`` gives, which is no
    output of the model; ``None`` where there is no such node."""
    readers = readers_of(node)
    alone = len(readers) == 1 and not node.outputs[0].is_graph_output()
    return readers[0] if alone and (not kinds or readers[0].op_type in kinds) else None
