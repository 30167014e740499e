"""An ONNX graph as the rules read it: indexed once, constants read where a rule needs their values.

Source: ONNX IR specification (graphs, nodes, initializers, subgraphs in attributes), ``onnx.proto``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from backquant.errors import ExportError

WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})

# operators that TensorRT computes in the kernel of the weighted operator before them
JOINED = frozenset({"BatchNormalization", "Clip", "LeakyRelu", "Relu"})

# operators that move values: what is quantized before them is quantized behind them (DepthToSpace and
# SpaceToDepth are shuffle layers in TensorRT's importer of ONNX files, as Reshape and Transpose are)
MOVING = {
    *("DepthToSpace", "Flatten", "Identity", "MaxPool", "Reshape", "Slice", "SpaceToDepth"),
    *("Squeeze", "Transpose", "Unsqueeze"),
}


@dataclass(frozen=True, eq=False)
class Node:
    """One operator. ``inputs``, ``outputs``: names of values; an input that is left out has none."""

    kind: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    proto: Any

    @classmethod
    def of(cls, proto: Any) -> Node:
        """The operator of a ``NodeProto``, named after its first output where it has no name."""
        name = proto.name or (proto.output[0] if proto.output else proto.op_type)
        return cls(proto.op_type, str(name), tuple(proto.input), tuple(proto.output), proto)

    def input(self, index: int) -> str:
        """The name of an input; empty where it is absent."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute's value, or ``default``."""
        from onnx.helper import get_attribute_value

        for attribute in self.proto.attribute:
            if attribute.name == name:
                return get_attribute_value(attribute)
        return default

    @property
    def is_blocked(self) -> bool:
        """Whether one scale serves a block of values."""
        return bool(self.attribute("block_size", 0))


class GraphView:
    """One graph (or subgraph) of a model. ``folder``: where external data lies.

    Invariant: building it visits every node, initializer and value once.
    """

    def __init__(
        self, graph: Any, opset: int, folder: Path | None, outer: GraphView | None = None
    ) -> None:
        self.opset, self.outer = opset, outer
        self._folder = folder
        self.nodes = [Node.of(node) for node in graph.node if node.op_type != "Constant"]
        self.outputs = {value.name for value in graph.output}
        self._constants: dict[str, Any] = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant":
                self._constants.update(_constant(node))
        self._producers = {name: node for node in self.nodes for name in node.outputs}
        self._readers: dict[str, list[Node]] = {}
        for each in self.nodes:
            for name in dict.fromkeys(each.inputs):
                self._readers.setdefault(name, []).append(each)
        self._values = {
            value.name: value for value in (*graph.value_info, *graph.input, *graph.output)
        }

    def producer(self, value: str) -> Node | None:
        """The node that computes ``value``; None for inputs and constants."""
        found = self._producers.get(value)
        if found is None and self.outer is not None and value not in self._constants:
            return self.outer.producer(value)
        return found

    def readers(self, value: str) -> list[Node]:
        """The nodes of this graph that read ``value``."""
        return self._readers.get(value, [])

    def constant(self, value: str) -> Any | None:
        """The ``TensorProto`` behind ``value``; None if it is computed or given."""
        found = self._constants.get(value)
        if found is None and self.outer is not None:
            return self.outer.constant(value)
        return found

    def array(self, value: str) -> np.ndarray[Any, Any]:
        """A constant's values as floats or integers. Raises ``ExportError`` when they cannot be read."""
        from onnx import numpy_helper
        from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

        tensor = self.constant(value)
        assert tensor is not None
        try:
            if uses_external_data(tensor):
                if self._folder is None:
                    raise ValueError("its data is in another file, and the model has no folder")
                copied = type(tensor)()
                copied.CopyFrom(tensor)
                load_external_data_for_tensor(copied, str(self._folder))
                tensor = copied
            made = numpy_helper.to_array(tensor)
        except Exception as error:
            raise ExportError(
                f"the values of {value} cannot be read: {' '.join(str(error).split())[:200]}",
                where=value,
                fix="check the file, and that its external data lies beside it",
            ) from error
        return made.astype(np.float64 if made.dtype.kind not in "iu" else np.int64)

    def shape(self, value: str) -> tuple[int | None, ...] | None:
        """The dimensions (None: of any size), or None where the file does not say."""
        tensor = self.constant(value)
        if tensor is not None:
            return tuple(tensor.dims)
        found = self._values.get(value)
        if found is None:
            return None if self.outer is None else self.outer.shape(value)
        if not found.type.tensor_type.HasField("shape"):
            return None
        dims = found.type.tensor_type.shape.dim
        return tuple(d.dim_value if d.HasField("dim_value") else None for d in dims)

    def element_type(self, value: str) -> str:
        """The element type of ``value`` as ONNX names it (``"INT8"``); empty where the file does not say."""
        from onnx import TensorProto

        number = self._element_type(value)
        return str(TensorProto.DataType.Name(number)) if number else ""

    def _element_type(self, value: str) -> int:
        tensor = self.constant(value)
        if tensor is not None:
            return int(tensor.data_type)
        node = self.producer(value)
        if node is not None and node.kind == "QuantizeLinear":
            zero_point = node.input(2)
            given = self._element_type(zero_point) if zero_point else 0
            return given or int(node.attribute("output_dtype", 0))
        found = self._values.get(value)
        return 0 if found is None else int(found.type.tensor_type.elem_type)

    @cached_property
    def _dequantized(self) -> dict[str, Node]:
        """The DequantizeLinear behind each value that comes out of one, directly or by moving."""
        found: dict[str, Node] = {}
        for node in self.nodes:
            behind = found.get(node.input(0)) if node.kind in MOVING else None
            if node.kind == "DequantizeLinear":
                behind = node
            if behind is not None:
                found.update(dict.fromkeys(node.outputs, behind))
        return found

    @cached_property
    def _kernels(self) -> dict[str, Node]:
        """The quantized weighted operator whose kernel computes each value."""
        found: dict[str, Node] = {}
        for node in self.nodes:
            kernel = found.get(node.input(0)) if node.kind in JOINED else None
            if node.kind in WEIGHTED and self.is_quantized(node):
                kernel = node
            elif node.kind == "Add":
                kernel = self._kernel_of_sum(node, found)
            if kernel is not None:
                found.update(dict.fromkeys(node.outputs, kernel))
        return found

    def _kernel_of_sum(self, node: Node, found: dict[str, Node]) -> Node | None:
        """A bias, or a dequantized value, is added in the kernel of what it is added to."""
        for one, other in (node.inputs, reversed(node.inputs)):
            if one in found and (self.constant(other) is not None or self.is_dequantized(other)):
                return found[one]
        return None

    @cached_property
    def quantized_next(self) -> frozenset[str]:
        """Values that only QuantizeLinear reads, directly or after moving."""
        found: set[str] = set()
        for node in reversed(self.nodes):
            into = node.kind == "QuantizeLinear"
            if into or (node.kind in MOVING and all(map(found.__contains__, node.outputs[:1]))):
                value = node.input(0)
                if value not in self.outputs and self._all_into(value, found):
                    found.add(value)
        return frozenset(found)

    def _all_into(self, value: str, found: set[str]) -> bool:
        return all(
            reader.kind == "QuantizeLinear"
            or (reader.kind in MOVING and reader.outputs[0] in found)
            for reader in self.readers(value)
        )

    def dequantize_behind(self, value: str) -> Node | None:
        """The DequantizeLinear, of this or an outer graph, that gives ``value``, if only moved since."""
        found = self._dequantized.get(value)
        if found is None and self.outer is not None:
            return self.outer.dequantize_behind(value)
        return found

    def is_dequantized(self, value: str) -> bool:
        """Whether ``value`` comes out of a DequantizeLinear, directly or by moving."""
        return self.dequantize_behind(value) is not None

    def is_quantized(self, node: Node) -> bool:
        """Whether one of the first two inputs of ``node`` is dequantized."""
        return any(self.is_dequantized(node.input(index)) for index in (0, 1))

    def kernel_of(self, value: str) -> Node | None:
        """The quantized weighted operator whose kernel computes ``value``."""
        return self._kernels.get(value)

    def depends_on_constants(self, value: str) -> bool:
        """Whether ``value`` is a constant, or one that was quantized, dequantized or moved."""
        steps = 0
        while self.constant(value) is None:
            node = self.producer(value)
            steps += 1
            known = node is not None and (
                node.kind in MOVING or node.kind in ("QuantizeLinear", "DequantizeLinear")
            )
            if not known or node is None or not node.inputs or steps > _LONGEST:
                return False
            value = node.inputs[0]
        return True


_LONGEST = 8  # nodes between a weight and the operator that reads it


def _constant(node: Any) -> Iterator[tuple[str, Any]]:
    """The tensor of a Constant node under its output's name."""
    from onnx import helper, numpy_helper

    for attribute in node.attribute:
        if attribute.name == "value":
            yield node.output[0], attribute.t
        elif attribute.name in ("value_float", "value_floats"):
            array = np.array(helper.get_attribute_value(attribute), np.float32)
            yield node.output[0], numpy_helper.from_array(array)
        elif attribute.name in ("value_int", "value_ints"):
            array = np.array(helper.get_attribute_value(attribute), np.int64)
            yield node.output[0], numpy_helper.from_array(array)


def graph_views(model: Any, folder: Path | None) -> Iterator[GraphView]:
    """The model's graph, then those inside of its nodes (If, Loop, Scan)."""
    opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=1)
    waiting: list[tuple[Any, GraphView | None]] = [(model.graph, None)]
    while waiting:
        graph, outer = waiting.pop()
        view = GraphView(graph, opset, folder, outer)
        yield view
        for node in graph.node:
            for attribute in node.attribute:
                inner = [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
                waiting += [(sub, view) for sub in inner]


# What a rule is, and what it finds.

Severity = Literal["error", "advice"]
#: Of each place of a node that breaks a rule: what is wrong, what was expected, what was found.
Hits = Iterable[tuple[str, str, str]]


@dataclass(frozen=True)
class Rule:
    """One documented rule.

    ``severity``: ``"error"``: TensorRT refuses the file; ``"advice"``: it takes the file and runs some of
    it in a higher precision, or slower. ``source``: where the rule is documented; ``basis``: what of
    it is read there. ``kinds``: the operators that it is about. ``check`` yields what of one of these breaks
    it, in constant time.
    """

    id: str
    title: str
    severity: Severity
    source: str
    basis: str
    kinds: tuple[str, ...]
    check: Callable[[GraphView, Node], Hits]

    def findings(self, view: GraphView) -> Iterator[Finding]:
        """The places of a graph that break it, in graph order."""
        for node in view.nodes:
            for hit in self.check(view, node) if node.kind in self.kinds else ():
                yield Finding(self.id, self.severity, node.name, *hit, self.source)


@dataclass(frozen=True)
class Finding:
    """One place of a file that breaks a rule.

    ``rule``: its id; ``severity``: ``"error"`` or ``"advice"``; ``citation``: the address of the
    documentation.

    >>> print(Finding("zero-point", "error", "q", "the zero point is not 0", "0", "128", "https://…"))
    error   zero-point  q: the zero point is not 0 (expected 0, found 128)
    """

    rule: str
    severity: Severity
    node: str
    what: str
    expected: str
    found: str
    citation: str

    def __str__(self) -> str:
        return (
            f"{self.severity:6s}  {self.rule}  {self.node}: {self.what} "
            f"(expected {self.expected}, found {self.found})"
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields by name.

        >>> Finding("opset", "error", "file", "too old", "13", "11", "https://…").to_dict()["rule"]
        'opset'
        """
        return dict(vars(self))


# Where TensorRT's rules are documented.
_DOCS = "https://docs.nvidia.com/deeplearning/tensorrt"
QUANTIZE = f"{_DOCS}/operators/docs/Quantize.html"
EXPLICIT = f"{_DOCS}/latest/inference-library/quantized-types-explicit-quantization.html"
SCHEMES = f"{_DOCS}/latest/inference-library/quantized-types-schemes.html"
CUSTOM_QDQ = f"{_DOCS}/tensorflow-quantization-toolkit/docs/docs/add_custom_qdq_cases.html"
OPERATORS = "https://github.com/onnx/onnx-tensorrt/blob/main/docs/operators.md"
PARSER_BIAS = "https://github.com/onnx/onnx-tensorrt/issues/850"
ONNX_QUANTIZE = "https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html"
POOLING = f"{_DOCS}/operators/docs/Pooling.html"
DECONVOLUTION = f"{_DOCS}/operators/docs/Deconvolution.html"
