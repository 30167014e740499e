"""What an export gives: the file, and what the target will run it on, as read back from the target."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backquant.dtypes import QParams
from backquant.json_text import plain_data
from backquant.match.plan import Reason

_SHOWN = 3
ON_KERNELS = "on integer kernels"


@dataclass(frozen=True)
class TargetKernel:
    """One operator of the target, as the target itself names it.

    ``nodes``: the nodes of the reference graph that it computes (empty where the target does not say).
    ``dtype``: the precision that it computes in, e.g. ``"int8"``, ``"float32"``, ``"bfloat16"``.
    """

    kernel: str
    nodes: tuple[str, ...]
    dtype: str
    integer: bool

    def __str__(self) -> str:
        return f"{'+'.join(self.nodes) or '?'}: {self.kernel} ({self.dtype})"


@dataclass(frozen=True)
class Written:
    """What a target reports of the file it wrote.

    ``left_in_float``: why operators run in float, by node; what is not named gets a general reason.
    ``undelegated``: what runs outside of the target's delegates, quantized or not.
    ``means``: where operators that count as integer are. ``figures``: what the target's compiler says of
    the file, by name.
    """

    runtime: str  # name and version, e.g. "onnxruntime 1.31.1"
    kernels: tuple[TargetKernel, ...]
    left_in_float: tuple[Reason, ...] = ()
    undelegated: tuple[Reason, ...] = ()
    means: str = ON_KERNELS
    figures: Mapping[str, Any] = field(default_factory=dict)


def edges_as_data(edges: Mapping[str, QParams]) -> dict[str, dict[str, Any]]:
    """
    >>> edges_as_data({})
    {}
    """
    return {
        name: {
            "dtype": str(qparams.dtype).removeprefix("torch."),
            "scale": qparams.scale,
            "zero_point": qparams.zero_point,
            "quant_min": qparams.quant_min,
            "quant_max": qparams.quant_max,
        }
        for name, qparams in edges.items()
    }


@dataclass(frozen=True)
class Exported:
    """An exported model.

    ``kernels``: what the target runs, as read back from it. ``left_in_float``: the operators that were
    quantized and that the target computes in float, each with the reason. ``expected`` counts the
    operators that were quantized, ``integer`` those of them on integer kernels; ``integer_share`` is
    the share of all multiply-adds of the model (on the example inputs) that integer kernels do, not a
    number where those of some operators (``uncounted``) are not known.
    ``undelegated``: for targets with delegates (ExecuTorch), every operator that runs outside of them, by
    node, with the reason. ``means``: where the operators are that count as integer; of a target without a
    runtime, between quantize and dequantize nodes. ``notes``: what the comparison of the file with the
    reference model has to say, if anything. ``figures``: what the target's compiler says, by name.
    ``edges``: what the integers of inputs and outputs stand for, by ``"x"`` and ``"output 0"``.
    ``sqnr``: of each output, and of each part that the model joins in it, of the file beside the reference
    model in dB, where the target's runtime is here (120: the same values).

    >>> exported = Exported(Path("m.onnx"), "onnx", "onnxruntime 1.31", expected=2, integer=2,
    ...                     integer_share=1.0)
    >>> print(exported)
    m.onnx: onnx for onnxruntime 1.31; 2 of 2 quantized operators on integer kernels, 100.0% of the \
multiply-adds
    """

    path: Path
    target: str
    runtime: str
    kernels: tuple[TargetKernel, ...] = ()
    left_in_float: tuple[Reason, ...] = ()
    undelegated: tuple[Reason, ...] = ()
    expected: int = 0
    integer: int = 0
    integer_share: float = 0.0
    files: tuple[Path, ...] = field(default_factory=tuple)
    uncounted: tuple[str, ...] = ()
    means: str = ON_KERNELS
    notes: tuple[str, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    edges: Mapping[str, QParams] = field(default_factory=dict)
    sqnr: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        share = f"{self.integer_share:.1%}"
        if math.isnan(self.integer_share):
            share = f"an unknown share ({', '.join(self.uncounted)}: not counted)"
        return (
            f"{self.path}: {self.target} for {self.runtime}; {self.integer} of {self.expected} "
            f"quantized operators {self.means}, {share} of the multiply-adds"
            + "".join(f"\n  {note}" for note in self.notes)
        )

    @property
    def kernel_counts(self) -> dict[str, int]:
        """How often each kernel occurs, the most frequent first."""
        counts = Counter(f"{use.kernel} ({use.dtype})" for use in self.kernels)
        return dict(counts.most_common())

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-able data."""
        share = None if math.isnan(self.integer_share) else self.integer_share
        paths = {"path": str(self.path), "files": [str(path) for path in self.files]}
        edges = edges_as_data(self.edges)
        return {**plain_data(self), **paths, "integer_share": share, "edges": edges}

    def render(self) -> str:
        """What a person reads on a terminal."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield str(self)
        for kernel, count in self.kernel_counts.items():
            yield f"  {count:4d} × {kernel}"
        for name, figure in self.figures.items():
            yield f"  {name}: {figure}"
        for name, qparams in self.edges.items():
            yield f"  {name}: {qparams}"
        for name, sqnr in self.sqnr.items():
            yield f"  {name}: SQNR {sqnr:.1f} dB beside the reference model"
        if self.left_in_float:
            yield "quantized, and computed in float by the target:"
        for reason in self.left_in_float:
            yield f"  {reason.node}: {reason.admitted}"
        if self.undelegated:
            yield "outside of the delegates:"
        for why, nodes in self._by_reason().items():
            shown = ", ".join(nodes[:_SHOWN]) + (" …" if len(nodes) > _SHOWN else "")
            yield f"  {len(nodes)} × {why} ({shown})"

    def _by_reason(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for reason in self.undelegated:
            found.setdefault(reason.admitted, []).append(reason.node)
        return found
