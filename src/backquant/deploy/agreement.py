"""Whether a written file computes what the reference model does: called in the runtime that it is for.

1. One loaded file is called on the example inputs, on others of the same sizes (floats drawn anew, so that
   samples and outputs have distinct values), and on the example inputs again.
2. Where sizes are free, the calls rise and fall (3, 7, 2, 7 on each free axis, as far as bounds and the model
   allow; else the example's size, twice, half): a program may keep what an earlier call has left.
3. Each output is compared on its own. How far roundings may lead it is measured on the reference model (see
   ``roundings``); a constant has to come out as it is.
4. A target may have a second way to run a file, without the shortcuts of this CPU (sums of 16 bits where it
   has no VNNI, products in bfloat16). What is right there is right in the file, and noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils import _pytree as pytree

from backquant.deploy.examples import with_sizes_on_free_axes
from backquant.deploy.job import ExportJob
from backquant.deploy.program import quiet
from backquant.deploy.roundings import dithered_values, output_values, ratio
from backquant.deploy.session import Loaded
from backquant.errors import ExportError, first_line
from backquant.graph.objects import tensors_of

__all__ = ["ExactTarget", "check_agreement"]

_SAME = 60.0  # dB: no rounding was another one
_MORE = 6.0  # dB: four times the noise that roundings make is no rounding
_SEEDS = 3
_SIZES = (3, 7, 2, 7)


@runtime_checkable
class ExactTarget(Protocol):
    """A target that can run a file without the shortcuts of this CPU: rule 4."""

    def exact(self, path: Path) -> Loaded:
        """Load a file that the target wrote."""
        ...


@dataclass(frozen=True)
class _Call:
    """One call: inputs, what the reference model gives for them, and words for them."""

    job: ExportJob
    wanted: list[Any]
    words: str


def check_agreement(job: ExportJob, target: Any, path: Path) -> tuple[str, ...]:
    """Notes on how the file at ``path`` was compared; none where ``target`` has no runtime here.

    Raises ``ExportError`` where an output differs by more than roundings can explain, or a call fails.
    """
    load: Callable[[Path], Loaded] | None = getattr(target, "loaded", None)
    if load is None:
        return ()
    calls = [*_calls(job)]
    if not calls:
        return ("not compared: the reference model gives no numbers on the example inputs",)
    wrong = _first_wrong(load(path), calls)
    if wrong is None:
        return ()
    if isinstance(target, ExactTarget) and _first_wrong(target.exact(path), calls) is None:
        return (f"on this CPU {target.name}'s own shortcuts differ from the file: {wrong}",)
    raise ExportError(
        f"{target.name} computes something else than the reference model: {wrong}",
        where=f"{path.name}, called after it was written",
        fix="leave the operator out of the quantization, or export to another target",
    )


def _calls(job: ExportJob) -> Iterator[_Call]:
    """Rules 1 and 2; what the reference model does not take is left out."""
    known: dict[str, _Call | None] = {}

    def call(words: str, args: Any, kwargs: Any) -> Iterator[_Call]:
        if words not in known:
            known[words] = _call(replace(job, args=args, kwargs=kwargs), words)
        found = known[words]
        if found is not None:
            yield found

    example = "the example inputs"
    if not job.dynamic_shapes:
        yield from call(example, job.args, job.kwargs)
        yield from call("inputs drawn anew", *_drawn((job.args, dict(job.kwargs))))
        yield from call(example, job.args, job.kwargs)
        return
    calls = [*(c for size in _SIZES for c in call(f"free sizes of {size}", *_sized(job, size)))]
    if not calls:
        calls = [
            c
            for factor in (1.0, 2.0, 0.5, 2.0)
            for c in call(f"{factor:g} times the free sizes", *_sized(job, factor))
        ]
    yield from calls
    yield from call(example, job.args, job.kwargs)


def _sized(job: ExportJob, size: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
    names = [str(node.target) for node in job.module.graph.find_nodes(op="placeholder")]
    grown = with_sizes_on_free_axes(job.args, job.kwargs, job.dynamic_shapes, (names, size))
    return _drawn(grown)


def _drawn(inputs: Any) -> Any:
    """``inputs`` with other floats of the same range; whole numbers (masks) and integers as they are."""
    generator = torch.Generator().manual_seed(0)

    def drawn(value: torch.Tensor) -> torch.Tensor:
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


def _call(job: ExportJob, words: str) -> _Call | None:
    try:
        wanted = output_values(job)
    except Exception:  # sizes or values that the model does not take
        return None
    floats = [v for v in wanted if isinstance(v, torch.Tensor) and v.is_floating_point()]
    if any(v.numel() and not v.isfinite().any() for v in floats):
        return None
    return _Call(job, wanted, words)


def _first_wrong(loaded: Loaded, calls: Sequence[_Call]) -> str | None:
    """What the first call that differs gives, in words."""
    for before, call in zip([None, *calls], calls, strict=False):
        leaves = pytree.tree_leaves((call.job.args, dict(call.job.kwargs)))
        inputs = [part for leaf in leaves for part in tensors_of(leaf) or [leaf]]
        try:
            with quiet():
                got = loaded.run([_array(value) for value in inputs])
        except Exception as error:
            if call.words == "the example inputs" or not call.job.dynamic_shapes:
                return f"it does not run on {call.words}: {first_line(error)}"
            continue  # a size that the target fixes, and says so
        wrong = _wrong_output(call, [torch.as_tensor(value) for value in got])
        if wrong is not None:
            after = f", called after {before.words}" if before is not None else ""
            return f"{wrong} on {call.words}{after}"
    return None


def _array(value: Any) -> Any:
    return value.detach().numpy() if isinstance(value, torch.Tensor) else value


def _wrong_output(call: _Call, got: Sequence[torch.Tensor]) -> str | None:
    """Rule 3."""
    if len(got) != len(call.wanted):
        return f"{len(got)} outputs instead of {len(call.wanted)}"
    far = {}
    for place, (one, other) in enumerate(zip(call.wanted, got, strict=True)):
        if not isinstance(one, torch.Tensor) or not one.is_floating_point():
            continue
        near = ratio([one], [other.to(one.dtype)])
        if near < _SAME:
            far[place] = near
    for seed in range(_SEEDS) if far else ():
        noisy = dithered_values(call.job, seed)
        far = {
            place: near
            for place, near in far.items()
            if near < ratio([call.wanted[place]], [noisy[place]]) - _MORE
        }
        if not far:
            return None
    for place, near in far.items():
        return (
            f"output {place} differs with an SQNR of {near:.1f} dB, more than noise of half a step at every "
            "rounding leaves,"
        )
    return None
