"""OpenVINO's 8-bit convolutions on AMX, some of which give wrong numbers.

Its copy of oneDNN has the defect of torch's (docs/kernels.md): shapes whose rule is not known. So the file is
run on the example inputs. Where it is far from the reference model, it is run once more in a process whose
oneDNN may not use AMX: the same runtime, file and inputs. Nearer there, the numbers of this CPU are wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from backquant.deploy.exported import TargetKernel
from backquant.deploy.job import ExportJob
from backquant.errors import ExportError
from backquant.lower.machine import machine_facts

__all__ = ["check_amx"]

_NEAR = 20.0  # dB: results that are as near as roundings of integers leave them
_MORE = 6.0  # dB: half the noise of the amplitude is no rounding
_RUN = """
import sys
import numpy as np
import openvino
hints = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
model = openvino.Core().compile_model(sys.argv[1], "CPU", hints)
given = np.load(sys.argv[2])
results = model([given[name] for name in given.files])
np.savez(sys.argv[3], *(results[item] for item in model.outputs))
"""


def check_amx(job: ExportJob, path: Path, kernels: Sequence[TargetKernel]) -> None:
    """Raise ``ExportError`` if the model at ``path`` computes wrong numbers here, and right ones without AMX.

    Nothing is run where the CPU has no AMX, where it is switched off, or without integer convolutions.
    """
    convolves = any(use.kernel.startswith("Convolution") and use.integer for use in kernels)
    if not convolves or not _uses_amx():
        return
    inputs = _arrays((job.args, dict(job.kwargs)))
    with torch.no_grad():
        wanted = _arrays(job.module(*job.args, **job.kwargs))
    here = _ratio(wanted, _outputs(path, inputs))
    if here is None or here >= _NEAR:
        return
    without = _ratio(wanted, _outputs_without_amx(path, inputs))
    if without is None or without < here + _MORE:
        return
    raise ExportError(
        f"OpenVINO's 8-bit convolutions are wrong on this CPU: {here:.1f} dB to the reference model with "
        f"AMX, {without:.1f} dB without",
        where="a defect of the oneDNN in OpenVINO on CPUs with AMX, in convolutions of some shapes "
        "(docs/kernels.md)",
        fix="set the environment variable ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI before Python starts, here\n"
        "and wherever the file runs on such a CPU",
    )


def _uses_amx() -> bool:
    facts = machine_facts()
    limit = facts.isa_limit.upper()
    return bool(facts.capabilities.get("amx_int8")) and (not limit or "AMX" in limit)


def _arrays(value: Any) -> list[np.ndarray]:
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return [(t.float() if t.dtype is torch.bfloat16 else t).numpy() for t in tensors]


def _outputs(path: Path, inputs: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """What OpenVINO computes in this process; ``None`` where it does not take these inputs."""
    import openvino

    hints = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    try:
        model = openvino.Core().compile_model(str(path), "CPU", hints)
        results = model(list(inputs))
    except RuntimeError:
        return None
    return [np.array(results[item]) for item in model.outputs]


def _outputs_without_amx(path: Path, inputs: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """The same in a process of its own, whose oneDNN reads another limit when it starts."""
    with tempfile.TemporaryDirectory() as folder:
        given, got = Path(folder, "given.npz"), Path(folder, "got.npz")
        np.savez(given, *inputs)
        command = [sys.executable, "-c", _RUN, str(path), str(given), str(got)]
        environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        if done.returncode:
            return None
        with np.load(got) as results:
            return [results[name] for name in results.files]


def _ratio(wanted: Sequence[np.ndarray], got: Sequence[np.ndarray] | None) -> float | None:
    """The least signal-to-noise ratio of the floating-point outputs, in dB; ``None``: they do not compare."""
    if got is None or [a.shape for a in wanted] != [b.shape for b in got]:
        return None
    ratios = []
    for one, two in zip(wanted, got, strict=True):
        signal, noise = float(np.square(one).sum()), float(np.square(one - two).sum())
        if np.issubdtype(one.dtype, np.floating) and signal > 0:
            ratios.append(120.0 if noise <= signal * 1e-12 else 10 * np.log10(signal / noise))
    return float(min(ratios)) if ratios and np.isfinite(ratios).all() else None
