"""How far roundings lead a reference model: what a runtime may differ from it by.

In deep networks one rounding becomes many. Noise of half a step before each quantize node shows what is left
at the end: a runtime whose results are as near computes the same, with some values rounded the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from backquant.deploy.job import OUTPUT, ExportJob
from backquant.deploy.program import quiet
from backquant.lower.qdq import is_quantize

__all__ = [
    "computed",
    "dithered",
    "dithered_values",
    "float_tensors",
    "output_values",
    "ratio",
    "real_values",
]

_MOST = 120.0  # dB
_DYNAMIC = tuple(  # their scale is measured at each call
    f"quantized_decomposed.{name}"
    for name in ("quantize_per_tensor.tensor", "quantize_per_token.default")
)


def computed(job: ExportJob) -> list[torch.Tensor]:
    """The floating-point outputs of the reference model on copies of the example inputs."""
    return _run(_ByName(job))


def dithered(job: ExportJob) -> list[torch.Tensor]:
    """The same with uniform noise of up to half a step at the input of each quantize node."""
    return _run(_Dithered(job))


def output_values(job: ExportJob) -> list[Any]:
    """All outputs of the reference model on copies of the example inputs, flat."""
    return _flat(_ByName(job))


def dithered_values(job: ExportJob, seed: int) -> list[Any]:
    """The same with the noise of ``dithered``."""
    return _flat(_Dithered(job, seed))


def real_values(job: ExportJob, values: Sequence[Any]) -> list[Any]:
    """``values``, the flat outputs of a call, with floats for the integers that stand for some."""
    pending = [qparams for name, qparams in job.edges.items() if name.startswith(OUTPUT)]
    made = []
    for value in values:
        stands_for = pending and isinstance(value, torch.Tensor) and value.dtype == pending[0].dtype
        made.append(_real(value, *pending.pop(0).args) if stands_for else value)
    return made


def _real(value: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    return (value.float() - zero_point) * scale


def float_tensors(value: Any) -> list[torch.Tensor]:
    """The floating-point tensors in ``value``, however nested.

    >>> float_tensors((torch.ones(1), {"places": torch.ones(2, dtype=torch.int64)}))
    [tensor([1.])]
    """
    leaves = pytree.tree_leaves(value)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]


def ratio(wanted: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> float:
    """The least signal-to-noise ratio of an output, in dB; outputs of other shapes or that are finite at
    other places have none.

    >>> round(ratio([torch.ones(4)], [torch.full((4,), 1.1)]), 3)
    20.0
    >>> ratio([torch.ones(4)], [torch.ones(3)])
    -120.0
    """
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


class _ByName(fx.Interpreter):
    """Runs a reference model on the example inputs; an input that is not given has its default."""

    def __init__(self, job: ExportJob) -> None:
        super().__init__(job.module)
        names = [str(node.target) for node in job.module.graph.find_nodes(op="placeholder")]
        self.given = dict(zip(names, job.args, strict=False)) | dict(job.kwargs)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        del kwargs
        if target not in self.given:
            return args[0]
        return pytree.tree_map_only(torch.Tensor, torch.clone, self.given[target])


class _Dithered(_ByName):
    def __init__(self, job: ExportJob, seed: int = 0) -> None:
        super().__init__(job)
        self.generator = torch.Generator().manual_seed(seed)

    def run_node(self, n: fx.Node) -> Any:
        if not (is_quantize(n) or str(n.target) in _DYNAMIC):
            return super().run_node(n)
        value, scale, *rest = self.fetch_args_kwargs_from_env(n)[0]
        noise = torch.rand(value.shape, generator=self.generator, dtype=value.dtype) - 0.5
        noisy = value + (noise * scale).to(value.dtype)  # a scale may be a tensor of float64
        return self.call_function(n.target, (noisy, scale, *rest), {})


def _run(interpreter: _ByName) -> list[torch.Tensor]:
    return float_tensors(_flat(interpreter))


def _flat(interpreter: _ByName) -> list[Any]:
    with quiet(), torch.no_grad():
        made: list[Any] = pytree.tree_leaves(interpreter.run())
    return made
