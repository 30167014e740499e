"""A file in a session of ONNX Runtime's CPU provider."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backquant.deploy.exported import TargetKernel
from backquant.deploy.onnx.exporter import origin_of, origins_of
from backquant.files import workspace
from backquant.lower.machine import machine_facts

if TYPE_CHECKING:
    import onnx

_CALLS = 3  # of a round
_KERNEL = "_kernel_time"


class OnnxRuntimeSession:
    """See ``backquant.deploy.session.Session``. ``is_exact``: without integer kernels where the
    CPU has no VNNI, whose sums overflow 16 bits."""

    def __init__(self, path: Path, threads: int, *, is_exact: bool = False) -> None:
        self._path, self._threads, self._is_exact = path, threads, is_exact
        self._session = self._loaded(self._options())
        self.inputs: Mapping[str, Sequence[int | None]] = {
            given.name: [size if isinstance(size, int) else None for size in given.shape]
            for given in self._session.get_inputs()
        }

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """One call."""
        found: list[Any] = self._session.run(None, self._feed(inputs))
        return found

    def times(self, inputs: Sequence[Any], rounds: int) -> dict[str, float]:
        """From the profile that the session writes."""
        with workspace() as folder:
            options = self._options()
            options.enable_profiling = True
            options.profile_file_prefix = str(folder / "profile")
            options.optimized_model_filepath = str(folder / "optimised.onnx")
            session = self._loaded(options)
            for _ in range(rounds * _CALLS):
                session.run(None, self._feed(inputs))
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
            origins = self._origins(folder / "optimised.onnx")
        least: dict[str, float] = {}
        for event in events:
            name = str(event.get("name", ""))
            if event.get("cat") == "Node" and name.endswith(_KERNEL):
                node, seconds = name.removesuffix(_KERNEL), 1e-6 * event["dur"]
                least[node] = min(seconds, least.get(node, seconds))
        found: dict[str, float] = {}
        for node, seconds in least.items():
            origin = origins.get(node, "")
            found[origin] = found.get(origin, 0.0) + seconds
        return found

    def _origins(self, optimised: Path) -> Mapping[str, str]:
        """The reference graph's node behind each node of the optimised graph, by name."""
        import onnx
        import onnx_ir

        known = origins_of(onnx_ir.load(self._path))
        found = {}
        for node in onnx.load(str(optimised), load_external_data=False).graph.node:
            names = (node.name, *node.output)
            found[node.name] = next(filter(None, (origin_of(n, known) for n in names)), "")
        return found

    def _options(self) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = self._threads
        facts = machine_facts()
        if self._is_exact and facts.is_x86 and not facts.has_vnni:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return options

    def _loaded(self, options: Any) -> Any:
        import onnxruntime

        return onnxruntime.InferenceSession(
            str(self._path), options, providers=["CPUExecutionProvider"]
        )

    def _feed(self, inputs: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.inputs, inputs, strict=True))


# The kernels that ONNX Runtime chose, from the graph that it optimised for this CPU.
#
# Source: ONNX Runtime documentation, "Graph optimizations" (offline mode writes the optimised graph) and
# "Contrib operators" (``com.microsoft``).


# Integer products whose input is float: they quantize it themselves.
_QUANTIZING = frozenset({"DynamicQuantizeMatMul", "DynamicQuantizeLSTM"})
_CONVERSIONS = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})

# Kernels whose result has the type of their input.
_KEEPING = {
    *("Clip", "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "MaxPool", "NhwcMaxPool"),
    *("Pad", "Relu", "Reshape", "Resize", "Slice", "Split", "Squeeze", "Tile", "Transpose"),
    "Unsqueeze",
}


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


def _few_bits(node: onnx.NodeProto) -> TargetKernel | None:
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


def _gives_integers(node: onnx.NodeProto, types: Mapping[str, str]) -> bool:
    if node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear"):
        return True
    if node.op_type.startswith("QLinear"):
        return True
    if node.op_type == "QGemm":  # without the scale of its output it gives floats
        return len(node.input) > 7 and bool(node.input[7])
    return node.op_type in _KEEPING and _reads_integers(node, types)


def _reads_integers(node: onnx.NodeProto, types: Mapping[str, str]) -> bool:
    if node.op_type.startswith("QLinear"):  # of a concatenation the first input is a scale
        return True
    return bool(node.input) and types.get(node.input[0]) == "integer"
