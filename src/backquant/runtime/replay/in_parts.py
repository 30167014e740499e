"""A batch whose samples are computed one after the other, each through the whole program.

What an operator gives for one image is still in the cache when the next operator reads it; of a batch of
images it is not. And threads that compute a sample each wait for each other once, not at the end of each
operator.

Only for models that compute each sample by itself (``unmixed``), and where that gives the same bits as the
whole batch: it is tried on the call that is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from backquant.operators.samples import Mixed
from backquant.runtime.replay.program import Program
from backquant.runtime.replay.record import NotReplayable, Recording, Ref, record
from backquant.runtime.replay.shortened import shortened
from backquant.runtime.replay.threads import on_threads
from backquant.runtime.replay.unmixed import Result, samples_apart

_DIM = 0  # of inputs, that holds samples


def in_parts(
    whole: Recording,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    constants: Callable[[], Any],
) -> InParts:
    """What gives the result of ``whole``, shortened, sample by sample. ``call`` is the model that it was
    recorded of, with these arguments; it is called with those of the first sample.

    Raises ``Mixed`` where samples are not known to be apart, and ``NotReplayable``.
    """
    leaves = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
    given = list({id(value): value for value in leaves}.values())
    count = _count(given)
    if len(given) != len(whole.inputs):
        raise Mixed("tensors stand within objects")
    holding = {
        name: _DIM
        for name, value in zip(whole.inputs, given, strict=True)
        if _holds_samples(value, count)
    }
    results = samples_apart(whole, holding, count)
    first, its = tree_map(lambda value: _sample(value, 0, count), (args, kwargs))
    _, recording = record(call, first, its, constants)
    if isinstance(recording, NotReplayable):
        raise recording
    if not _fits(recording, whole, results, count):
        raise Mixed("a single sample gives a result of another structure")
    return InParts(Program(shortened(recording)), results, whole.result, count)


def _fits(part: Recording, whole: Recording, results: Sequence[Result], count: int) -> bool:
    """Whether the result of one sample is a part of that of all: the tensors' sizes, and what is no
    tensor."""
    (ours, structure), (leaves, its) = tree_flatten(part.result), tree_flatten(whole.result)
    if structure != its:
        return False
    made = iter(results)
    for one, other in zip(ours, leaves, strict=True):
        if not isinstance(other, Ref):
            if one != other:
                return False
            continue
        each = next(made)
        size = list(each.size)
        if each.samples is not None:
            size[each.samples] //= count
        if not isinstance(one, Ref) or list(part.layouts[one.name].size) != size:
            return False
    return True


def _count(tensors: Sequence[torch.Tensor]) -> int:
    counts = [value.size(_DIM) for value in tensors if value.dim()]
    if not counts or counts[0] < 2:
        raise Mixed("there is one sample")
    return counts[0]


def _holds_samples(value: Any, count: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.size(_DIM) == count


def _sample(value: Any, place: int, count: int) -> Any:
    return value.narrow(_DIM, place, 1) if _holds_samples(value, count) else value


class InParts:
    """``program``: of one sample; ``results``: the tensors in ``structure``, the result of ``count``
    samples."""

    def __init__(
        self, program: Program, results: Sequence[Result], structure: Any, count: int
    ) -> None:
        self.program, self.results, self.count = program, results, count
        self._leaves, self._structure = tree_flatten(structure)
        self._places = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, Ref)]

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        """The result for the flattened tensor arguments."""
        made = list(self._leaves)
        for place, each in zip(self._places, self.results, strict=True):
            if each.samples is not None:
                made[place] = torch.empty_strided(each.size, each.stride, dtype=each.dtype)

        def compute(sample: int) -> None:
            given = [_sample(value, sample, self.count) for value in tensors]
            found = tree_flatten(self.program(given))[0]
            for place, each in zip(self._places, self.results, strict=True):
                value = found[place]
                if each.samples is not None:
                    rows = value.size(each.samples)
                    made[place].narrow(each.samples, sample * rows, rows).copy_(value)
                elif sample == 0:
                    made[place] = value

        on_threads(compute, range(self.count))
        return tree_unflatten(made, self._structure)
