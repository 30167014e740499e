"""The kernels that ONNX Runtime chose, from the graph that it optimised for this CPU.

Source: ONNX Runtime documentation, "Graph optimizations" (offline mode writes the optimised graph) and
"Contrib operators" (``com.microsoft``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from backquant.deploy.exported import TargetKernel
from backquant.deploy.onnx.provenance import origin_of
from backquant.files import workspace

# Integer products whose input is float: they quantize it themselves.
_QUANTIZING = frozenset({"DynamicQuantizeMatMul", "DynamicQuantizeLSTM"})
_CONVERSIONS = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
# Kernels whose result has the type of their input.
_KEEPING = frozenset(
    {
        "Clip",
        "Concat",
        "DepthToSpace",
        "Expand",
        "Flatten",
        "Gather",
        "MaxPool",
        "NhwcMaxPool",
        "Pad",
        "Relu",
        "Reshape",
        "Resize",
        "Slice",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    }
)


def kernels_of(path: Path, origins: Mapping[str, str]) -> tuple[TargetKernel, ...]:
    """One record for each node of the optimised graph, in its order.

    ``origins`` names the reference graph's node behind each node and tensor of the file.
    """
    import onnx

    with workspace() as folder:
        optimised = folder / "optimised.onnx"
        _optimise(path, optimised)
        graph = onnx.load(str(optimised), load_external_data=False).graph
    types = _types(graph, onnx)
    found = []
    for node in graph.node:
        if node.op_type in _CONVERSIONS or node.op_type == "Constant":
            continue
        names = (node.name, *node.output)
        origin = next(filter(None, (origin_of(name, origins) for name in names)), "")
        few = _few_bits(node)
        if few is not None:
            found.append(replace(few, nodes=(origin,) if origin else ()))
            continue
        integer = node.op_type in _QUANTIZING or _reads_integers(node, types)
        found.append(
            TargetKernel(
                node.op_type, (origin,) if origin else (), "int8" if integer else "float32", integer
            )
        )
    return tuple(found)


def _few_bits(node: Any) -> TargetKernel | None:
    """A kernel that reads weights of few bits in groups: its name says the precision of its activations."""
    if node.op_type not in ("MatMulNBits", "GatherBlockQuantized"):
        return None
    numbers = {attribute.name: attribute.i for attribute in node.attribute}
    bits, size = numbers.get("bits", 4), numbers["block_size"]
    level = numbers.get("accuracy_level", 0)
    activations = ", int8 activations" if level == 4 else ""
    name = f"{node.op_type}(groups of {size}{activations})"
    return TargetKernel(name, (), f"int{bits}", integer=True)


def _optimise(path: Path, optimised: Path) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.optimized_model_filepath = str(optimised)
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _types(graph: Any, onnx: Any) -> dict[str, str]:
    """``"integer"`` for each tensor of 8-bit integers, by name."""
    eight_bits = (onnx.TensorProto.UINT8, onnx.TensorProto.INT8)
    types = {t.name: "integer" for t in graph.initializer if t.data_type in eight_bits}
    for value in (*graph.input, *graph.value_info):
        if value.type.tensor_type.elem_type in eight_bits:
            types[value.name] = "integer"
    for node in graph.node:
        if _gives_integers(node, types):
            types.update(dict.fromkeys(node.output, "integer"))
    return types


def _gives_integers(node: Any, types: Mapping[str, str]) -> bool:
    if node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear"):
        return True
    if node.op_type.startswith("QLinear"):
        return True
    if node.op_type == "QGemm":  # without the scale of its output it gives floats
        return len(node.input) > 7 and bool(node.input[7])
    return node.op_type in _KEEPING and _reads_integers(node, types)


def _reads_integers(node: Any, types: Mapping[str, str]) -> bool:
    if node.op_type.startswith("QLinear"):  # of a concatenation the first input is a scale
        return True
    return bool(node.input) and types.get(node.input[0]) == "integer"
