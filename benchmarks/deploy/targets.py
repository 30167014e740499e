"""The targets of the table: for each, what makes the float model, its own quantizer's, and ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from benchmarks.peers import Prepared, Task

__all__ = ["TABLE", "TARGETS", "Contender"]


@dataclass(frozen=True)
class Contender:
    """``own``: what the runtime's own quantizer is called. The others: ``module:function`` of peers.

    ``packages``: whose versions are part of the result.
    """

    title: str
    own: str
    forms: dict[str, str]
    packages: tuple[str, ...] = ()

    def prepare(self, form: str) -> Callable[[Task], Prepared]:
        """The function, its packages imported now."""
        module, _, function = self.forms[form].partition(":")
        found: Callable[[Task], Prepared] = getattr(
            import_module(f"benchmarks.peers.{module}"), function
        )
        return found


TARGETS: dict[str, Contender] = {
    "native": Contender(
        "x86 in PyTorch",
        "torch.ao FX",
        {"ours": "ours:prepare", "float": "eager:prepare", "own": "torch_ao:prepare"},
    ),
    "onnxruntime": Contender(
        "ONNX Runtime",
        "quantize_static",
        {
            "ours": "deployed:prepare_onnxruntime",
            "float": "onnx_runtime:prepare_float",
            "own": "onnx_runtime:prepare_int8",
        },
        ("onnxruntime", "onnx", "onnxscript"),
    ),
    "openvino": Contender(
        "OpenVINO",
        "NNCF",
        {
            "ours": "deployed:prepare_openvino",
            "float": "openvino:prepare_float",
            "own": "openvino:prepare_int8",
        },
        ("openvino", "nncf"),
    ),
    "executorch": Contender(
        "ExecuTorch, XNNPACK",
        "XNNPACKQuantizer",
        {
            "ours": "executorch:prepare_ours",
            "float": "executorch:prepare_float",
            "own": "executorch:prepare_own",
        },
        ("executorch", "torchao"),
    ),
    "executorch_dynamic": Contender(
        "ExecuTorch, XNNPACK, dynamic",
        "XNNPACKQuantizer, dynamic",
        {
            "ours": "executorch:prepare_ours_dynamic",
            "float": "executorch:prepare_float",
            "own": "executorch:prepare_own_dynamic",
        },
        ("executorch", "torchao"),
    ),
    "inductor": Contender(
        "AOTInductor",
        "X86InductorQuantizer",
        {
            "ours": "inductor:prepare_ours",
            "float": "inductor:prepare_float",
            "own": "inductor:prepare_own",
        },
        ("torchao",),
    ),
}
#: Those that are measured unless others are named.
TABLE = ("native", "onnxruntime", "openvino", "executorch", "inductor")
