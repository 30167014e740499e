"""Reads from an exported file which operators stand between dequantize and quantize nodes, for targets
without a runtime here.

A planned operator is written as planned where every value that its nodes compute with is dequantized, a
constant that needs no scale (a bias), or computed inside of it. One whose activations stay float has a
dequantized weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from backquant.deploy.exported import TargetKernel
from backquant.deploy.job import ExpectedOperator, ExportJob
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode

__all__ = ["BETWEEN", "Computed", "Read", "written_operators"]

#: How an export counts what it finds so.
BETWEEN = "between quantize and dequantize nodes"


@dataclass(frozen=True)
class Read:
    """A value that an operator of the file reads.

    ``source``: the reference graph's node that it comes from; ``dtype``: of the integers that it is
    dequantized from, empty where it is not; ``is_free``: whether it needs no scale (integers, biases).
    """

    source: str = ""
    dtype: str = ""
    is_free: bool = False


@dataclass(frozen=True)
class Computed:
    """An operator of the file that is no quantization; ``origin``: the reference graph's node."""

    origin: str
    name: str
    reads: tuple[Read, ...]


def written_operators(
    job: ExportJob, computed: Iterable[Computed]
) -> tuple[tuple[TargetKernel, ...], tuple[Reason, ...]]:
    """A record for each operator of the plan that the file holds, and for each that it computes in float;
    and why planned ones are not written as planned.

    >>> from backquant.backend_config import BackendConfig
    >>> from backquant.match.plan import Plan
    >>> from torch import fx
    >>> planned = (ExpectedOperator("fc", "Linear", "fc", ("fc",), 8),)
    >>> job = ExportJob(fx.GraphModule({}, fx.Graph()), (), {}, None, BackendConfig("b"), Plan("b"), {},
    ...                 planned)
    >>> reads = (Read("x", "int8"), Read(dtype="int8"))
    >>> [str(kernel) for kernel in written_operators(job, [Computed("fc", "Gemm", reads)])[0]]
    ['fc: Gemm (int8)']
    """
    by_origin: dict[str, list[Computed]] = {}
    for operator in computed:
        by_origin.setdefault(operator.origin, []).append(operator)
    kernels, left = [], []
    for expected in job.expected:
        parts = [part for node in expected.nodes for part in by_origin.pop(node, [])]
        if not parts:
            continue
        name = "+".join(dict.fromkeys(part.name for part in parts))
        float_part = _float_part(expected, parts)
        dtype = "float32" if float_part is not None else _dtype(parts)
        kernels.append(TargetKernel(name, expected.nodes, dtype, float_part is None))
        if float_part is not None:
            left.append(_reason(expected, float_part))
    kernels += _others(by_origin)
    return tuple(kernels), tuple(left)


def _float_part(expected: ExpectedOperator, parts: list[Computed]) -> Computed | None:
    if expected.has_float_activations:
        return None if any(read.dtype for part in parts for read in part.reads) else parts[0]
    for part in parts:
        for read in part.reads:
            if not (read.dtype or read.is_free or read.source in expected.nodes):
                return part
    return None


def _dtype(parts: list[Computed]) -> str:
    read = [read.dtype for part in parts for read in part.reads if read.dtype]
    return " × ".join(dict.fromkeys(read)) or "float32"


def _reason(expected: ExpectedOperator, part: Computed) -> Reason:
    return Reason(
        expected.node,
        ReasonCode.TARGET_FLOAT,
        asked=f"{expected.operator} {BETWEEN}",
        admitted=f"{part.name} reads a value that no node dequantizes",
        place=expected.module_path,
    )


def _others(by_origin: Mapping[str, list[Computed]]) -> Iterable[TargetKernel]:
    for origin, parts in by_origin.items():
        nodes = (origin,) if origin else ()
        for part in parts:
            yield TargetKernel(part.name, nodes, "float32", False)
