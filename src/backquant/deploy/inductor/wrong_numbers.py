"""Whether a package computes what the reference model does.

AOTInductor's own fusions give wrong numbers for some models (torch 2.13), so a package is run on the
example inputs. How far roundings may lead is measured on the reference model itself: see ``roundings``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from backquant.deploy.examples import with_twice_on_free_axes
from backquant.deploy.job import ExportJob
from backquant.deploy.program import quiet
from backquant.deploy.roundings import computed, dithered, float_tensors, ratio
from backquant.errors import ExportError, first_line

_NEAR = 20.0  # dB: as near as roundings of integers leave results
_MORE = 3.0  # dB: twice the noise that roundings make is no rounding


def check_numbers(job: ExportJob, path: Path) -> None:
    """Raise ``ExportError`` if the package at ``path`` computes something else than ``job.module``, or stops.

    Passes what is within 20 dB of it, or within twice the noise of its roundings; with free sizes on inputs
    of twice these sizes, too, where the reference model takes such: a package that fixes a size says nothing.
    """
    _check(job, computed(job), _outputs(job, path), "the example inputs")
    if not job.dynamic_shapes:
        return
    names = [str(node.target) for node in job.module.graph.find_nodes(op="placeholder")]
    args, kwargs = with_twice_on_free_axes(job.args, job.kwargs, job.dynamic_shapes, names)
    twice = replace(job, args=args, kwargs=kwargs)
    try:
        wanted, got = computed(twice), _outputs(twice, path)
    except Exception:  # sizes that the model does not take
        return
    _check(twice, wanted, got, "inputs of twice the free sizes")


def _check(
    job: ExportJob, wanted: list[torch.Tensor], got: list[torch.Tensor], inputs: str
) -> None:
    found = ratio(wanted, got)
    if found >= _NEAR:
        return
    rounding = ratio(wanted, dithered(job))
    if found >= rounding - _MORE:
        return
    raise ExportError(
        f"AOTInductor computes wrong numbers: {found:.1f} dB to the reference model on {inputs}, "
        f"where noise of half a step at every rounding leaves {rounding:.1f} dB",
        where=f"torch {torch.__version__}: fusions of its compiler (docs/kernels.md)",
        fix='quantize for another target: backend="x86" with compile(), "onnxruntime" or "openvino"',
    )


def _clone(value: Any) -> Any:
    """A model may change its inputs."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, value)


def _outputs(job: ExportJob, path: Path) -> list[torch.Tensor]:
    args, kwargs = _clone((job.args, dict(job.kwargs)))
    try:
        with quiet(), torch.no_grad():
            return float_tensors(torch._inductor.aoti_load_package(str(path))(*args, **kwargs))
    except RuntimeError as error:
        raise ExportError(
            "the package that AOTInductor made does not run on the example inputs: "
            f"{first_line(error)}",
            where=f"torch {torch.__version__}",
            fix='quantize for another target: backend="x86" with compile(), "onnxruntime" or "openvino"',
        ) from error
