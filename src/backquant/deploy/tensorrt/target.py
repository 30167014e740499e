"""The target ``tensorrt``: an ONNX file that breaks none of the rules that TensorRT documents.

Where TensorRT and a GPU are, the file is built, and the engine's own list of layers is what is reported as
kernels. Elsewhere it is what the file asks for, operator by operator: with explicit quantization TensorRT
computes in INT8 or FP8 what reads dequantized values only.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from backquant.deploy.exported import TargetKernel, Written
from backquant.deploy.job import ExportJob
from backquant.deploy.onnx import REQUIRES, onnx_model, save_onnx, untranslated
from backquant.deploy.onnx.exporter import origin_of, origins_of
from backquant.deploy.target import Requirement
from backquant.deploy.tensorrt.check import check_onnx
from backquant.deploy.tensorrt.rules import FLOAT8
from backquant.deploy.tensorrt.view import (
    JOINED,
    MOVING,
    WEIGHTED,
    Finding,
    GraphView,
    Node,
    graph_views,
)
from backquant.errors import EngineError, ExportError
from backquant.match.plan import Reason

# Engines that TensorRT builds from an ONNX file, on the GPU of this machine.
#
# Source: TensorRT's developer guide, "Engine Inspector" and "Explicit Quantization". Run with TensorRT 8.6.0
# on an NVIDIA H200; what its later versions have renamed is looked up by name.


#: How long TensorRT looks for kernels, 0 to 5; its own default is 3, which can take minutes.
LEVEL = 1
_NO_KERNEL = frozenset({"Reformat", "NoOp", "Constant", "Shuffle"})
_ONNX_LAYER = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
_PRECISION = {"int8": "int8", "fp8": "float8", "fp16": "float16", "bf16": "bfloat16"}

_SHOWN = 400


def is_installed() -> bool:
    """Whether the package ``tensorrt`` is installed.

    >>> isinstance(is_installed(), bool)
    True
    """
    return importlib.util.find_spec("tensorrt") is not None


def finds_gpu() -> bool:
    """Whether TensorRT is installed and finds a GPU, which processes that are forked afterwards cannot use.

    >>> isinstance(finds_gpu(), bool)
    True
    """
    return is_installed() and _builder(_logger()) is not None


def version() -> str:
    """TensorRT's version, and the GPU's name where torch sees it."""
    import tensorrt

    gpu = f" on {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    return f"tensorrt {tensorrt.__version__}{gpu}"


class BuiltEngine:
    """The engine of one file. See ``backquant.deploy.session.Loaded``.

    Raises ``ExportError`` with TensorRT's words where its parser or its builder refuses the file.
    """

    def __init__(self, path: Path, level: int = LEVEL) -> None:
        import tensorrt as trt

        logger = _logger()
        serialized = _serialized(path, level, logger)
        self._runtime = trt.Runtime(logger)
        self._engine = self._runtime.deserialize_cuda_engine(serialized)
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        read = trt.TensorIOMode.INPUT
        self._given = [name for name in names if self._engine.get_tensor_mode(name) == read]
        self._made = [name for name in names if name not in self._given]

    @property
    def inputs(self) -> Mapping[str, Sequence[int | None]]:
        """Sizes of the inputs by name."""
        return {
            name: [None if size < 0 else size for size in self._engine.get_tensor_shape(name)]
            for name in self._given
        }

    def kernels(self, origins: Mapping[str, str]) -> tuple[TargetKernel, ...]:
        """The layers that compute, as the engine's inspector lists them; ``origins`` names the reference
        graph's node behind each node of the file."""
        import tensorrt as trt

        inspector = self._engine.create_engine_inspector()
        told = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
        return inspected_kernels(told, origins)

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """One call; arrays in and out. Raises ``EngineError`` where this build of torch sees no GPU."""
        if not torch.cuda.is_available():
            raise EngineError(
                "torch sees no GPU, which holds the values of TensorRT's engines",
                where="engine tensorrt",
                fix="a build of torch with CUDA",
            )
        context = self._engine.create_execution_context()
        held = [torch.from_numpy(array).contiguous().cuda() for array in inputs]
        for name, value in zip(self._given, held, strict=True):
            context.set_input_shape(name, tuple(value.shape))
            context.set_tensor_address(name, value.data_ptr())
        made = [
            torch.empty(self._shape(context, name), dtype=self._dtype(name), device="cuda")
            for name in self._made
        ]
        for name, value in zip(self._made, made, strict=True):
            context.set_tensor_address(name, value.data_ptr())
        torch.cuda.synchronize()
        if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise EngineError("TensorRT could not run the engine", where="engine tensorrt")
        torch.cuda.synchronize()
        return [value.cpu().numpy() for value in made]

    def _shape(self, context: Any, name: str) -> tuple[int, ...]:
        return tuple(context.get_tensor_shape(name))

    def _dtype(self, name: str) -> torch.dtype:
        """Of a tensor of the engine, by TensorRT's name of its dtype."""
        told = str(self._engine.get_tensor_dtype(name)).rpartition(".")[2].lower()
        known = {
            "float": torch.float32,
            "half": torch.float16,
            "bf16": torch.bfloat16,
            "fp8": torch.float8_e4m3fn,
        }
        return known.get(told) or getattr(torch, told)


def inspected_kernels(told: str, origins: Mapping[str, str]) -> tuple[TargetKernel, ...]:
    """One record for each layer of the inspector's JSON text that computes.

    A layer computes on the precision of all that it reads. One that reads integers and floats is one of
    floats.

    >>> reads = '"Inputs": [{"Format/Datatype": "Row major Int8 format"}]'
    >>> told = '{"Layers": [{"Name": "fc/Gemm", "LayerType": "CaskConvolution", ' + reads + '}]}'
    >>> print(*inspected_kernels(told, {"fc/Gemm": "fc"}))
    fc: CaskConvolution (int8)
    """
    found = []
    for layer in json.loads(told, strict=False)["Layers"]:
        if isinstance(layer, str) or layer.get("LayerType") in _NO_KERNEL:
            continue  # a name alone, of an engine built without details
        dtypes = {_precision(each["Format/Datatype"]) for each in layer.get("Inputs", ())}
        dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
        whole = dtype in ("int8", "float8")
        nodes = dict.fromkeys(origin_of(name, origins) for name in _names(layer))
        nodes.pop("", None)
        found.append(TargetKernel(str(layer.get("LayerType")), tuple(nodes), dtype, whole))
    return tuple(found)


def _names(layer: Mapping[str, Any]) -> list[str]:
    """The file's nodes that a layer was made of: its metadata lists them, or its name does."""
    listed = _ONNX_LAYER.findall(str(layer.get("Metadata", "")))
    return listed or str(layer.get("Name", "")).split(" + ")


def _precision(told: str) -> str:
    words = told.lower()
    return next((dtype for word, dtype in _PRECISION.items() if word in words), "float32")


def _logger() -> Any:
    import tensorrt as trt

    class Kept(trt.ILogger):
        """Keeps errors, and is silent."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)

    return Kept()


def _builder(logger: Any) -> Any:
    """``None`` where there is no GPU, or no driver that TensorRT can use."""
    import tensorrt as trt

    try:
        return trt.Builder(logger)
    except TypeError:  # the binding's word for a null pointer
        return None


def _serialized(path: Path, level: int, logger: Any) -> Any:
    import tensorrt as trt

    builder = _builder(logger)
    if builder is None:
        raise EngineError("TensorRT finds no GPU", where="; ".join(logger.errors)[:_SHOWN])
    flags = trt.NetworkDefinitionCreationFlag
    typed = getattr(flags, "STRONGLY_TYPED", None)
    asked = typed if typed is not None else getattr(flags, "EXPLICIT_BATCH", None)
    network = builder.create_network(0 if asked is None else 1 << int(asked))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        words = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        raise _refused("parser", words)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.builder_optimization_level = level
    if typed is None:  # else the types are those of the file
        config.set_flag(trt.BuilderFlag.INT8)
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        raise _refused("builder", logger.errors)
    return serialized


def _refused(part: str, words: Sequence[str]) -> ExportError:
    return ExportError(
        f"TensorRT's {part} refuses the file: {'; '.join(words)[:_SHOWN]}",
        where="to='tensorrt'",
        fix="leave the operator that it names in float: "
        "get_default_qconfig_mapping('tensorrt').set_module_name(path, None)",
    )


_RUNTIME = "TensorRT, by the file's quantization"
_SHOWN_FINDINGS = 12

# what TensorRT computes on 8 bits; softmax, norms and others read floats. Its reference of operators has int8
# among the data types of Reduce, Resize and Slice (which Tile and Expand become)
_REDUCED = frozenset({"AveragePool", "GlobalAveragePool", "ReduceMean"})
_COPIED = frozenset({"Concat", "Expand", "Resize", "Tile"})
_QUANTIZABLE = frozenset({*WEIGHTED, *JOINED, *MOVING, *_REDUCED, *_COPIED, "Add", "Mul", "Sum"})


class TensorRTTarget:
    """See ``backquant.deploy.target.Target``. Options: ``opset``; ``level``: how long TensorRT looks for
    kernels (0 to 5) where it builds the file."""

    name = "tensorrt"
    backend = "tensorrt"
    suffixes = (".onnx",)
    extra = "onnx"
    requires: tuple[Requirement, ...] = REQUIRES
    options = ("opset", "level")

    def check(self, job: ExportJob) -> Sequence[Reason]:
        """The operators without an ONNX translation."""
        return untranslated(job)

    def write(self, job: ExportJob, path: Path) -> Written:
        """Write the file, check it, and say what it asks TensorRT to compute on integers.

        Raises ``ExportError`` with the findings when the file breaks a rule whose breach TensorRT
        refuses. Advice becomes the reason of the operators that it is about.
        """
        import onnx

        model = onnx_model(job)
        save_onnx(model, path, job)
        findings, origins = check_onnx(path), origins_of(model)
        errors = [finding for finding in findings if finding.severity == "error"]
        if errors:
            raise ExportError(
                f"the file breaks rules of TensorRT at {len(errors)} places",
                where="\n         ".join(map(str, errors[:_SHOWN_FINDINGS])),
                fix='backquant.quantize(model, ..., backend="tensorrt")',
            )
        left = tuple(_advice(finding, origins) for finding in findings)
        if finds_gpu():
            engine = BuiltEngine(path, int(job.options.get("level", LEVEL)))
            return Written(version(), engine.kernels(origins), left)
        graph = onnx.load(str(path), load_external_data=False)
        return Written(
            runtime=_RUNTIME,
            kernels=tuple(kernels_of(next(graph_views(graph, path.parent)), origins)),
            left_in_float=left,
        )


class TensorRTBuildingTarget(TensorRTTarget):
    """The same where the files can be run, too. See ``backquant.deploy.session.LoadingTarget``."""

    requires: tuple[Requirement, ...] = (*REQUIRES, Requirement("tensorrt", "tensorrt"))

    def loaded(self, path: Path) -> BuiltEngine:
        """Build the engine of a file."""
        return BuiltEngine(path)


def _advice(finding: Finding, origins: dict[str, str]) -> Reason:
    return Reason(
        origins.get(finding.node, finding.node),
        finding.rule,
        asked=finding.expected,
        admitted=f"{finding.what} ({finding.found})",
        fix=finding.citation,
    )


def kernels_of(view: GraphView, origins: dict[str, str]) -> Iterator[TargetKernel]:
    """One record for each operator of the file, in its order.

    ``origins`` names the reference graph's node behind each node and tensor of the file.
    """
    for node in view.nodes:
        if node.kind in ("QuantizeLinear", "DequantizeLinear"):
            continue
        origin = origins.get(node.proto.name, "")
        dtype = _node_precision(view, node)
        nodes = (origin,) if origin else ()
        yield TargetKernel(node.kind, nodes, dtype, dtype != "float32")


def _node_precision(view: GraphView, node: Node) -> str:
    """``int8`` or ``float8`` where every value that is no constant is dequantized, or joined."""
    if node.kind not in _QUANTIZABLE:
        return "float32"
    last = 2 if node.kind in WEIGHTED else len(node.inputs)
    behind: set[str] = set()
    for name in node.inputs[:last]:
        kernel, maker = view.kernel_of(name), view.dequantize_behind(name)
        if kernel is not None:
            maker = view.dequantize_behind(kernel.inputs[0])
        if maker is not None:
            behind.add(view.element_type(maker.input(0)))
        elif node.kind in WEIGHTED or not _constant(view, name):
            return "float32"
    if not behind:
        return "float32"
    return "float8" if FLOAT8 in behind else "int8"


def _constant(view: GraphView, name: str) -> bool:
    return not name or view.constant(name) is not None


TARGET: TensorRTTarget = TensorRTBuildingTarget() if is_installed() else TensorRTTarget()
