"""Whether a package computes what the reference model does.

AOTInductor's own fusions give wrong numbers for some models (torch 2.13), so a package is run on the
example inputs. In deep networks one rounding becomes many: how far roundings may lead is measured on the
reference model itself, with noise of half a step before each quantize node.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from backquant.deploy.job import ExportJob
from backquant.deploy.program import quiet
from backquant.errors import ExportError
from backquant.lower.qdq import is_quantize

_NEAR = 20.0  # dB: as near as roundings of integers leave results
_MORE = 3.0  # dB: twice the noise that roundings make is no rounding
_MOST = 120.0


def check_numbers(job: ExportJob, path: Path) -> None:
    """Raise ``ExportError`` if the package at ``path`` computes something else than ``job.module``, or stops.

    Passes what is within 20 dB of it, or within twice the noise of its roundings.
    """
    wanted = _computed(_ByName(job))
    found = _ratio(wanted, _outputs(job, path))
    if found >= _NEAR:
        return
    rounding = _ratio(wanted, _computed(_Dithered(job)))
    if found >= rounding - _MORE:
        return
    raise ExportError(
        f"AOTInductor computes wrong numbers: {found:.1f} dB to the reference model on the example inputs, "
        f"where noise of half a step at every rounding leaves {rounding:.1f} dB",
        where=f"torch {torch.__version__}: fusions of its compiler (docs/kernels.md)",
        fix='quantize for another target: backend="x86" with compile(), "onnxruntime" or "openvino"',
    )


class _ByName(fx.Interpreter):
    """Runs a reference model on the example inputs; an input that is not given has its default."""

    def __init__(self, job: ExportJob) -> None:
        super().__init__(job.module)
        names = [str(node.target) for node in job.module.graph.find_nodes(op="placeholder")]
        self.given = dict(zip(names, job.args, strict=False)) | dict(job.kwargs)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        del kwargs
        return _clone(self.given[target]) if target in self.given else args[0]


class _Dithered(_ByName):
    """The same with uniform noise of up to half a step at the input of each quantize node."""

    def __init__(self, job: ExportJob) -> None:
        super().__init__(job)
        self.generator = torch.Generator().manual_seed(0)

    def run_node(self, n: fx.Node) -> Any:
        if not is_quantize(n):
            return super().run_node(n)
        value, scale, *rest = self.fetch_args_kwargs_from_env(n)[0]
        noise = torch.rand(value.shape, generator=self.generator, dtype=value.dtype) - 0.5
        return self.call_function(n.target, (value + noise * scale, scale, *rest), {})


def _computed(interpreter: _ByName) -> list[torch.Tensor]:
    with quiet(), torch.no_grad():
        return _tensors(interpreter.run())


def _clone(value: Any) -> Any:
    """A model may change its inputs."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, value)


def _outputs(job: ExportJob, path: Path) -> list[torch.Tensor]:
    args, kwargs = _clone((job.args, dict(job.kwargs)))
    try:
        with quiet(), torch.no_grad():
            return _tensors(torch._inductor.aoti_load_package(str(path))(*args, **kwargs))
    except RuntimeError as error:
        raise ExportError(
            "the package that AOTInductor made does not run on the example inputs: "
            f"{str(error).strip().splitlines()[0]}",
            where=f"torch {torch.__version__}",
            fix='quantize for another target: backend="x86" with compile(), "onnxruntime" or "openvino"',
        ) from error


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(value)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]


def _ratio(wanted: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> float:
    """The least signal-to-noise ratio of an output, in dB; outputs of other shapes or that are finite at
    other places have none."""
    if [t.shape for t in wanted] != [t.shape for t in got]:
        return -_MOST
    return min(map(_one_ratio, wanted, got), default=_MOST)


def _one_ratio(wanted: torch.Tensor, got: torch.Tensor) -> float:
    finite = wanted.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return -_MOST
    one, two = wanted[finite].double(), got[finite].double()
    signal, noise = one.square().sum().item(), (one - two).square().sum().item()
    if noise <= signal * 10 ** (-_MOST / 10):
        return _MOST
    return float(10 * torch.log10(torch.tensor(max(signal, 1e-300) / noise)))
