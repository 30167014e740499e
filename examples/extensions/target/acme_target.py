"""A deployment target: a ``.acme`` file that holds the exported program, for the runtime of a chip."""

from collections.abc import Sequence
from pathlib import Path

import torch

from backquant.deploy import ExportJob, TargetKernel, Written
from backquant.match.plan import Reason


class AcmeTarget:
    name = "acme"
    backend = "onnxruntime"  # the description that models are quantized for
    suffixes = (".acme",)
    extra = ""
    requires = ()  # packages that writing needs
    options = ()

    def check(self, job: ExportJob) -> Sequence[Reason]:
        """What the runtime cannot take, before anything is written."""
        return [
            Reason(op.node, "acme-dynamic", "quantized at each call", "static quantization")
            for op in job.expected
            if op.is_dynamic
        ]

    def write(self, job: ExportJob, path: Path) -> Written:
        """Write the file, and say what the runtime makes of each operator."""
        with path.open("wb") as file:
            torch.export.save(job.program.exported, file)
        kernels = [
            TargetKernel(f"acme_{op.operator}", (op.node,), "int8", True) for op in job.expected
        ]
        return Written("acme 1.0", tuple(kernels))


TARGET = AcmeTarget()
