"""Whether a written file computes what the reference model does: called in the runtime that it is for.

1. One loaded file is called on inputs drawn anew in the range of the examples, so that samples and outputs
   have distinct values.
2. Where sizes are free, the calls rise and fall (3, 7, 2, 7 on each free axis, as far as bounds and the model
   allow; else the example's size, twice, half, twice): a program may keep what an earlier call has left.
3. Each output is compared on its own, integers by the values that they stand for. What differs by a third of
   its size and by more than roundings lead the reference model (see ``roundings``) is an error.
4. Where no call could be compared, a note says so.
5. A target may have a second way to run a file, without the shortcuts of this CPU (sums of 16 bits where it
   has no VNNI). What is right there is right in the file, and noted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils import _pytree as pytree

from backquant.deploy.examples import with_sizes_on_free_axes
from backquant.deploy.job import OUTPUT, ExportJob
from backquant.deploy.program import quiet
from backquant.deploy.roundings import (
    dithered_values,
    nested_output,
    output_values,
    ratio,
    real_values,
)
from backquant.deploy.session import Loaded, LoadingTarget
from backquant.deploy.target import Target
from backquant.errors import ExportError
from backquant.graph.objects import tensors_of
from backquant.operators.joined_outputs import JoinedOutput, joined_outputs

__all__ = ["Agreement", "ExactTarget", "check_agreement"]

_NEAR = 10.0  # dB: the difference is a third of the output
_MORE = 6.0  # dB: four times the noise that roundings make is no rounding
_NOTHING = 1e-6
_SIZES = (3, 7, 2, 7)
_FACTORS = (1.0, 2.0, 0.5, 2.0)


@runtime_checkable
class ExactTarget(Protocol):
    """A target that can run a file without the shortcuts of this CPU: rule 5."""

    def exact(self, path: Path) -> Loaded:
        """Load a file that the target wrote."""
        ...


@dataclass(frozen=True)
class _Call:
    """One call: inputs, what the reference model gives for them, words for them, and the outputs that it
    joins."""

    job: ExportJob
    wanted: list[Any]
    words: str
    joins: Mapping[int, JoinedOutput]

    def pieces(self, values: Sequence[Any]) -> dict[str, Any]:
        """``values`` of a call, and each joined part, by their names."""
        found: dict[str, Any] = {}
        for place, value in enumerate(values):
            found[f"output {place}"] = value
            join = self.joins.get(place)
            if join is not None:
                named = f"of {join.node!r}"
                found |= {
                    f"output {place}, part {number} {named}": part
                    for number, part in enumerate(join.parts(value))
                }
        return found


@dataclass(frozen=True)
class Agreement:
    """``notes`` on how a file was compared; ``sqnr``: of each output and joined part beside the reference
    model, in dB, the lowest of all calls."""

    notes: tuple[str, ...] = ()
    sqnr: Mapping[str, float] = field(default_factory=dict)


def check_agreement(job: ExportJob, target: Target, path: Path) -> Agreement:
    """How the file at ``path`` agrees; nothing is known where ``target`` has no runtime here.

    Raises ``ExportError`` where an output is another one than roundings can explain.
    """
    if not isinstance(target, LoadingTarget):
        return Agreement()
    calls = [*_calls(job)]
    wrong, sqnr = _first_wrong(target.loaded(path), calls)
    if wrong is None:
        why = f"{len(calls)} calls were tried" if calls else "the model takes no inputs drawn anew"
        notes = () if sqnr is not None else (f"nothing was compared in {target.name}: {why}",)
        return Agreement(notes, sqnr or {})
    if isinstance(target, ExactTarget):
        differs, exact = _first_wrong(target.exact(path), calls)
        if differs is None:
            note = f"on this CPU {target.name}'s own shortcuts differ from the file: {wrong}"
            return Agreement((note,), exact or {})
    raise ExportError(
        f"{target.name} computes something else than the reference model: {wrong}",
        where=f"{path.name}, called after it was written",
        fix="leave the operator out of the quantization, or export to another target",
    )


def _calls(job: ExportJob) -> Iterator[_Call]:
    """Rules 1 and 2; what the reference model does not take, or gives no numbers for, is left out."""
    if not job.dynamic_shapes:
        drawn = _drawn((job.args, dict(job.kwargs)), _integers_in(job))
        yield from _called(job, "inputs drawn anew", drawn)
        return
    calls = [c for size in _SIZES for c in _called(job, f"free sizes of {size}", _sized(job, size))]
    yield from calls or (
        c
        for factor in _FACTORS
        for c in _called(job, f"{factor:g} times the free sizes", _sized(job, factor))
    )


def _called(job: ExportJob, words: str, inputs: Any) -> Iterator[_Call]:
    args, kwargs = inputs
    called = replace(job, args=args, kwargs=kwargs)
    try:
        wanted = output_values(called)
    except Exception:  # sizes or values that the model does not take
        return
    floats = [v for v in wanted if isinstance(v, torch.Tensor) and v.is_floating_point()]
    if all(v.isfinite().any() for v in floats if v.numel()):
        joins = joined_outputs(
            called.module, lambda module: nested_output(replace(called, module=module))
        )
        yield _Call(called, real_values(job, wanted), words, joins)


def _sized(job: ExportJob, size: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
    names = [str(node.target) for node in job.module.graph.find_nodes(op="placeholder")]
    grown = with_sizes_on_free_axes(job.args, job.kwargs, job.dynamic_shapes, (names, size))
    drawn: tuple[tuple[Any, ...], dict[str, Any]] = _drawn(grown, _integers_in(job))
    return drawn


def _integers_in(job: ExportJob) -> frozenset[torch.dtype]:
    """The dtypes of inputs whose integers stand for floats."""
    inputs = (q for name, q in job.edges.items() if not name.startswith(OUTPUT))
    return frozenset(qparams.dtype for qparams in inputs)


def _drawn(inputs: Any, integers: Collection[torch.dtype] = ()) -> Any:
    """``inputs`` with other floats of the same range, and other values of these ``integers``; whole numbers
    (masks) and other integers as they are."""
    generator = torch.Generator().manual_seed(0)

    def drawn(value: torch.Tensor) -> torch.Tensor:
        if value.dtype in integers and value.numel():
            least, most = (int(one) for one in value.aminmax())
            return torch.randint(least, most + 1, value.shape, generator=generator).to(value.dtype)
        if not value.is_floating_point() or not value.numel() or not value.isfinite().all():
            return value
        if torch.equal(value, value.round()) and value.any():
            return value
        low, high = value.aminmax()
        mean, deviation = value.mean(), value.std(correction=0)
        if low == high:
            low, high, mean, deviation = low - 2, high + 2, low, low.new_tensor(1.0)
        noise = torch.randn(value.shape, generator=generator).to(value.dtype)
        return (mean + noise * deviation).clamp(low, high)

    return pytree.tree_map_only(torch.Tensor, drawn, inputs)


def _first_wrong(
    loaded: Loaded, calls: Sequence[_Call]
) -> tuple[str | None, dict[str, float] | None]:
    """What the first call that differs gives, in words, and the lowest SQNR of those that agreed before;
    ``None`` where none did."""
    before = ""
    lowest: dict[str, float] | None = None
    for call in calls:
        leaves = pytree.tree_leaves((call.job.args, dict(call.job.kwargs)))
        inputs = [part for leaf in leaves for part in tensors_of(leaf) or [leaf]]
        try:
            with quiet():
                results = loaded.run([_array(value) for value in inputs])
        except Exception:  # a size that the target fixes, and says so
            continue
        place, near = _compared(call, results)
        if place is not None:
            return f"{place} on {call.words}{before}", lowest
        before = f", called after {call.words}"
        lowest = {name: min(sqnr, (lowest or {}).get(name, sqnr)) for name, sqnr in near.items()}
    return None, lowest


def _array(value: Any) -> Any:
    return value.detach().numpy() if isinstance(value, torch.Tensor) else value


def _is_nothing(value: torch.Tensor) -> bool:
    """Whether all of it may be what is left of sums that cancel out."""
    return not value.numel() or bool(value.abs().max() < _NOTHING)


def _compared(call: _Call, results: Sequence[Any]) -> tuple[str | None, dict[str, float]]:
    """Rule 3: what is wrong, in words, and the SQNR of each output and joined part."""
    if len(results) != len(call.wanted):
        return f"{len(results)} outputs in place of {len(call.wanted)}", {}
    found = call.pieces(real_values(call.job, [torch.as_tensor(result) for result in results]))
    wanted = {
        place: value
        for place, value in call.pieces(call.wanted).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    near = {place: ratio([one], [found[place].to(one.dtype)]) for place, one in wanted.items()}
    far = [
        place
        for place, one in wanted.items()
        if near[place] < _NEAR
        and not (_is_nothing(one) and _is_nothing(found[place].to(one.dtype)))
    ]
    noisy = call.pieces(real_values(call.job, dithered_values(call.job, 0))) if far else {}
    for place in far:
        rounding = ratio([wanted[place]], [noisy[place]])
        if near[place] < rounding - _MORE:
            return (
                f"{place} differs with an SQNR of {near[place]:.1f} dB, where noise of half a step at every "
                f"rounding leaves {rounding:.1f} dB,"
            ), near
    return None, near
