"""The target ``openvino``: OpenVINO's IR (``.xml`` with its ``.bin``), or ONNX, run by its CPU plugin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from backquant.deploy.exported import Written
from backquant.deploy.job import ExportJob
from backquant.deploy.onnx import REQUIRES, onnx_model, save_onnx, untranslated
from backquant.deploy.onnx.rewrite import is_blocked
from backquant.deploy.openvino.session import OpenVinoSession, Origins, kernels_of
from backquant.deploy.openvino.workarounds import (
    check_amx,
    check_ends,
    join_wrapped,
    keep_reduced_axes,
    keep_scales_before_norms,
    keep_zero_biases,
    plain_transforms,
    round_whole,
    scale_tables,
    separate_biases,
    separate_weights,
    shift_bounds,
    sum_padded_averages,
)
from backquant.deploy.target import Requirement
from backquant.graph.silence import quiet
from backquant.match.plan import Reason

__all__ = ["TARGET", "OpenVinoTarget"]


class OpenVinoTarget:
    """See ``backquant.deploy.target.Target``. Options: ``opset`` of the ONNX file it goes through."""

    name = "openvino"
    backend = "openvino"
    suffixes = (".xml", ".onnx")
    extra = "openvino"
    requires = (
        *REQUIRES,
        Requirement("openvino", "openvino", "2025.0", "2026.4"),
    )
    options = ("opset",)

    def check(self, job: ExportJob) -> Sequence[Reason]:
        """The operators without an ONNX translation."""
        return untranslated(job)

    def write(self, job: ExportJob, path: Path) -> Written:
        """Write the file and read back the model that the CPU plugin compiles."""
        import openvino

        model = onnx_model(job)
        sum_padded_averages(model)
        join_wrapped(model)
        check_ends(model.graph)
        separate_biases(model)
        separate_weights(model)
        shift_bounds(model)
        round_whole(model)
        keep_reduced_axes(model)
        keep_zero_biases(model)
        keep_scales_before_norms(model)
        scale_tables(model)
        plain_transforms(model)
        through = path if path.suffix == ".onnx" else path.with_suffix(".onnx")
        save_onnx(model, through, job)
        with quiet():
            # not convert_model: it moves constants, and products behind them become bfloat16
            converted = openvino.Core().read_model(str(through))
            if any(is_blocked(node) for node in model.graph):
                # else products with weights in groups round their activations to 8 bits
                converted.set_rt_info("0", ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])
            if through != path:
                openvino.save_model(converted, str(path), compress_to_fp16=False)
                for item in path.parent.glob(f"{through.name}*"):
                    item.unlink()
            kernels = kernels_of(converted, Origins.of(model))
            check_amx(job, path, kernels)
        version = openvino.__version__.split("-")[0]
        return Written(runtime=f"openvino {version}", kernels=kernels)

    def session(self, path: Path, threads: int) -> OpenVinoSession:
        """See ``backquant.deploy.session``."""
        return OpenVinoSession(path, threads)

    def loaded(self, path: Path) -> OpenVinoSession:
        """See ``backquant.deploy.session``."""
        return OpenVinoSession(path, 1)

    def exact(self, path: Path) -> OpenVinoSession:
        """See ``backquant.deploy.run.ExactTarget``."""
        return OpenVinoSession(path, 1, is_exact=True)


TARGET = OpenVinoTarget()
