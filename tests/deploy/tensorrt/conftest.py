"""A small quantized ONNX model that breaks no rule, built by hand, for tests to break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper


def tensor(name: str, array: Any, dtype: Any = np.float32) -> Any:
    return numpy_helper.from_array(np.asarray(array, dtype), name)


def model(
    nodes: list[Any],
    constants: list[Any],
    *,
    inputs: dict[str, list[int]],
    outputs: dict[str, list[int]],
    opset: int = 18,
) -> Any:
    given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()]
    made = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in outputs.items()]
    graph = helper.make_graph(nodes, "test", given, made, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def pair(value: str, scale: str, zero: str = "zero") -> list[Any]:
    """``value`` quantized and dequantized, as ``value_dq``; nodes ``value_Q`` and ``value_DQ``."""
    return [
        helper.make_node("QuantizeLinear", [value, scale, zero], [f"{value}_q"], f"{value}_Q"),
        helper.make_node(
            "DequantizeLinear", [f"{value}_q", scale, zero], [f"{value}_dq"], f"{value}_DQ"
        ),
    ]


def weight(name: str, axis: int = 0) -> Any:
    return helper.make_node(
        "DequantizeLinear",
        [name, f"{name}_scale", f"{name}_zero"],
        [f"{name}_dq"],
        f"{name}_DQ",
        axis=axis,
    )


def weight_constants(name: str, shape: tuple[int, ...], channels: int) -> list[Any]:
    values = np.random.default_rng(0).integers(-127, 128, shape)
    return [
        tensor(name, values, np.int8),
        tensor(f"{name}_scale", np.linspace(0.01, 0.02, channels)),
        tensor(f"{name}_zero", np.zeros(channels), np.int8),
    ]


def residual() -> Any:
    """Input → Conv → Relu → (Conv + skip) → Relu → AveragePool, quantized as the documentation asks."""
    nodes = [
        *pair("x", "x_scale"),
        weight("w1"),
        helper.make_node("Conv", ["x_dq", "w1_dq", "b1"], ["c1"], "conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], "relu1"),
        *pair("r1", "r1_scale"),
        weight("w2"),
        helper.make_node("Conv", ["r1_dq", "w2_dq"], ["c2"], "conv2", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c2", "r1_dq"], ["s"], "add"),
        helper.make_node("Relu", ["s"], ["r2"], "relu2"),
        *pair("r2", "r2_scale"),
        helper.make_node("AveragePool", ["r2_dq"], ["p"], "pool", kernel_shape=[2, 2]),
        *pair("p", "r2_scale"),
        helper.make_node("Flatten", ["p_dq"], ["f"], "flatten"),
        weight("w3", axis=1),
        helper.make_node("Gemm", ["f", "w3_dq", "b3"], ["y"], "gemm"),
    ]
    constants = [
        tensor("zero", 0, np.int8),
        *(tensor(f"{name}_scale", 0.05) for name in ("x", "r1", "r2")),
        *weight_constants("w1", (4, 3, 3, 3), 4),
        *weight_constants("w2", (4, 4, 3, 3), 4),
        *weight_constants("w3", (196, 2), 2),
        tensor("b1", np.ones(4)),
        tensor("b3", np.ones(2)),
    ]
    return model(nodes, constants, inputs={"x": [1, 3, 8, 8]}, outputs={"y": [1, 2]})


class Editor:
    """Changes of a model by names of nodes and constants."""

    def __init__(self, made: Any) -> None:
        self.model, self.graph = made, made.graph

    def node(self, name: str) -> Any:
        return next(node for node in self.graph.node if node.name == name)

    def constant(self, name: str, array: Any, dtype: Any = np.float32) -> None:
        found = next((t for t in self.graph.initializer if t.name == name), None)
        if found is None:
            found = self.graph.initializer.add()
        found.CopyFrom(tensor(name, array, dtype))

    def insert(self, before: str, *nodes: Any) -> None:
        names = [node.name for node in self.graph.node]
        for node in reversed(nodes):
            self.graph.node.insert(names.index(before), node)

    def rewire(self, node: str, old: str, new: str) -> None:
        found = self.node(node)
        found.input[list(found.input).index(old)] = new


@pytest.fixture
def clean() -> Callable[[], Editor]:
    return lambda: Editor(residual())
