"""The target ``tensorrt``: an ONNX file that breaks none of the rules that TensorRT documents.

Where TensorRT and a GPU are, the file is built, and the engine's own list of layers is what is reported as
kernels. Elsewhere it is what the file asks for, operator by operator: with explicit quantization TensorRT
computes in INT8 or FP8 what reads dequantized values only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from backquant.deploy.exported import TargetKernel, Written
from backquant.deploy.job import ExportJob
from backquant.deploy.onnx import REQUIRES, onnx_model, save_onnx, untranslated
from backquant.deploy.onnx.provenance import origins_of
from backquant.deploy.target import Requirement
from backquant.deploy.tensorrt.check import check_onnx
from backquant.deploy.tensorrt.engine import LEVEL, BuiltEngine, finds_gpu, is_installed, version
from backquant.deploy.tensorrt.finding import Finding
from backquant.deploy.tensorrt.rules.qparams import FLOAT8
from backquant.deploy.tensorrt.view import JOINED, MOVING, WEIGHTED, GraphView, graph_views
from backquant.errors import ExportError
from backquant.match.plan import Reason

_RUNTIME = "TensorRT, by the file's quantization"
_SHOWN = 12
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
                where="\n         ".join(map(str, errors[:_SHOWN])),
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
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            continue
        origin = origins.get(node.name, "")
        dtype = _precision(view, node)
        nodes = (origin,) if origin else ()
        yield TargetKernel(node.op_type, nodes, dtype, dtype != "float32")


def _precision(view: GraphView, node: Any) -> str:
    """``int8`` or ``float8`` where every value that is no constant is dequantized, or joined."""
    if node.op_type not in _QUANTIZABLE:
        return "float32"
    last = 2 if node.op_type in WEIGHTED else len(node.input)
    behind: set[int] = set()
    for name in node.input[:last]:
        kernel, maker = view.kernel_of(name), view.dequantize_behind(name)
        if kernel is not None:
            maker = view.dequantize_behind(kernel.input[0])
        if maker is not None:
            behind.add(view.element_type(view.input(maker, 0)))
        elif node.op_type in WEIGHTED or not _constant(view, name):
            return "float32"
    if not behind:
        return "float32"
    return "float8" if FLOAT8 in behind else "int8"


def _constant(view: GraphView, name: str) -> bool:
    return not name or view.constant(name) is not None


TARGET: TensorRTTarget = TensorRTBuildingTarget() if is_installed() else TensorRTTarget()
