"""The target ``onnx``: an ONNX file, and what ONNX Runtime's CPU provider makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from backquant.deploy.exported import Written
from backquant.deploy.job import ExportJob
from backquant.deploy.onnx import REQUIRES, onnx_model, save_onnx, untranslated
from backquant.deploy.onnx.exporter import origins_of
from backquant.deploy.onnxruntime.session import OnnxRuntimeSession, kernels_of
from backquant.deploy.onnxruntime.workarounds import apply_workarounds
from backquant.deploy.target import Requirement
from backquant.match.plan import Reason

__all__ = ["TARGET", "OnnxRuntimeTarget"]


class OnnxRuntimeTarget:
    """See ``backquant.deploy.target.Target``. Options: ``opset``."""

    name = "onnx"
    backend = "onnxruntime"
    suffixes = (".onnx",)
    extra = "onnx"
    requires = (
        *REQUIRES,
        Requirement("onnxruntime", "onnxruntime", "1.21", "1.31"),
    )
    options = ("opset",)

    def check(self, job: ExportJob) -> Sequence[Reason]:
        """The operators without an ONNX translation."""
        return untranslated(job)

    def write(self, job: ExportJob, path: Path) -> Written:
        """Write the file and read back the optimised graph of a session of ONNX Runtime."""
        import onnxruntime

        model = onnx_model(job)
        apply_workarounds(model, job)
        save_onnx(model, path, job)
        return Written(
            runtime=f"onnxruntime {onnxruntime.__version__}",
            kernels=kernels_of(path, origins_of(model)),
        )

    def session(self, path: Path, threads: int) -> OnnxRuntimeSession:
        """See ``backquant.deploy.session``."""
        return OnnxRuntimeSession(path, threads)

    def loaded(self, path: Path) -> OnnxRuntimeSession:
        """See ``backquant.deploy.session``."""
        return OnnxRuntimeSession(path, 1)

    def exact(self, path: Path) -> OnnxRuntimeSession:
        """See ``backquant.deploy.run.ExactTarget``."""
        return OnnxRuntimeSession(path, 1, is_exact=True)


TARGET = OnnxRuntimeTarget()
