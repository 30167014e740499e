"""The target ``qdq-onnx``: an ONNX file in quantize and dequantize nodes, in no runtime's spelling.

1. What the reference model computes is what the file says: no operator is rewritten for the sake of a kernel.
2. The operator set is the first that has the dtypes. Weights whose range fits into four bits are stored so.
3. Operators of one's own are translated by one's own functions (the option ``translations``).
4. Described roundings and requantizations are functions of the file (``backquant.deploy.onnx.roundings``).

No runtime is asked: what counts is what stands between quantize and dequantize nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from backquant.deploy.exported import Written
from backquant.deploy.job import ExportJob
from backquant.deploy.onnx import REQUIRES, qdq_model, save_onnx, untranslated
from backquant.deploy.onnx.exporter import ORIGIN
from backquant.deploy.onnx.roundings import DOMAIN, described_quantize
from backquant.deploy.portable import BETWEEN, Computed, Read, written_operators
from backquant.deploy.roundings import STANDARD
from backquant.match.plan import Reason

_QDQ = ("DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear")
# positions of what a product multiplies; constants elsewhere are biases, which need no scale
_PRODUCTS = {
    "Conv": (0, 1),
    "ConvTranspose": (0, 1),
    "Gather": (0,),
    "Gemm": (0, 1),
    "MatMul": (0, 1),
}


class QDQTarget:
    """See ``backquant.deploy.target.Target``. Options: ``opset``, ``standard_quantize``, ``translations``."""

    name = "qdq-onnx"
    backend = "onnxruntime"
    suffixes = (".onnx",)
    extra = "onnx"
    requires = REQUIRES
    options = ("opset", STANDARD, "translations")

    def check(self, job: ExportJob) -> Sequence[Reason]:
        """The operators without an ONNX translation."""
        return untranslated(job, described_quantize(job))

    def write(self, job: ExportJob, path: Path) -> Written:
        """Write the file, and report which operators of the plan are quantized in it."""
        model = qdq_model(job)
        save_onnx(model, path, job)
        kernels, left = written_operators(job, _computed(model))
        version = model.opset_imports[""]
        return Written(f"ONNX, operator set {version}", kernels, left, means=BETWEEN)


def _computed(model: Any) -> Iterator[Computed]:
    for node in model.graph:
        if node.op_type in _QDQ or node.domain == DOMAIN:
            continue
        products = _PRODUCTS.get(node.op_type, ())
        reads = tuple(
            _read(value, value.const_value is not None and position not in products)
            for position, value in enumerate(node.inputs)
            if value is not None
        )
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        yield Computed(node.metadata_props.get(ORIGIN, ""), name, reads)


def _read(value: Any, is_bias: bool) -> Read:
    producer = value.producer()
    source = "" if producer is None else producer.metadata_props.get(ORIGIN, "")
    dtype = ""
    if producer is not None and producer.op_type == "DequantizeLinear":
        kind = producer.inputs[0].dtype
        dtype = "integers" if kind is None else kind.name.lower()
    known = value.dtype
    is_free = known is not None and not known.is_floating_point()
    return Read(source, dtype, is_bias or is_free)


TARGET = QDQTarget()
