"""Whether the operators of a recording compute each sample of a batch by itself, to the last bit.

So that the bits of sample s of the result follow from sample s of the inputs:

1. each operator is known to compute block s of its result from blocks s of its arguments, in the same way in
   any batch (``backquant.operators.samples``), or shows memory as it was written; and

2. nothing is written into constants or inputs.

What a model does with the number of samples as a number, ``alike`` sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten

from backquant.operators.samples import (
    Held,
    Mixed,
    check_numbers,
    dimension_of_samples,
    repeated,
)
from backquant.runtime.replay.overloads import AS_STRIDED, SETS
from backquant.runtime.replay.record import Call, Recording, Ref


class Result(NamedTuple):
    """A tensor of a result: how it lies in memory, and the dimension that holds samples (``None``: the same
    for all)."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    samples: int | None


class Apart(NamedTuple):
    """``results``: the tensors of the result, in their order. ``samples``: the dimension of each tensor that
    holds samples."""

    results: list[Result]
    samples: Mapping[str, int | None]


def samples_apart(recording: Recording, samples: Mapping[str, int], count: int) -> Apart:
    """Raises ``Mixed`` if samples are not apart.

    ``samples``: the dimension that holds the ``count`` samples, of those inputs that have one, by name. Cost:
    linear.

    >>> from backquant.runtime.replay.record import record
    >>> def apart(function):
    ...     _, found = record(function, (torch.ones(4, 3),), {}, list)
    ...     return samples_apart(found, {found.inputs[0]: 0}, 4).results
    >>> apart(lambda x: torch.relu(x) * 2)
    [Result(size=(4, 3), stride=(3, 1), dtype=torch.float32, samples=0)]
    >>> apart(lambda x: torch.relu(x).flip(0))
    Traceback (most recent call last):
    backquant.operators.samples.rules.Mixed: aten::flip over samples
    >>> apart(lambda x: x.relu_() + 1)
    Traceback (most recent call last):
    backquant.operators.samples.rules.Mixed: aten::relu_ writes into what the model is given, or holds
    """
    found = _Samples(recording, samples, count)
    for call in recording.calls:
        found.visit(call)
    return Apart(found.results(), found.samples)


class _Samples:
    def __init__(self, recording: Recording, samples: Mapping[str, int], count: int) -> None:
        self.recording, self.count = recording, count
        self.samples: dict[str, int | None] = dict.fromkeys(recording.constants)
        self.samples |= {name: samples.get(name) for name in recording.inputs}
        self.given = set(self.samples)  # what may be the memory of a constant or an input
        self.shown: dict[str, str] = {}  # by the name of a flat view: what it shows

    def visit(self, call: Call) -> None:
        outputs, read = _outputs(call), _names(call.arguments)
        if torch.Tag.nondeterministic_seeded in call.operator.tags:
            raise Mixed(f"{call.operator._schema.name} draws random numbers")
        self._check_writes(call, outputs, read)
        if call.operator is AS_STRIDED:  # no name of ``samples``: nothing but ``set_`` may read it
            self.shown[outputs[0]] = call.arguments[0].name
        else:
            place = self._place(call, outputs, read)
            self.samples.update(dict.fromkeys(outputs, place))

    def _check_writes(self, call: Call, outputs: list[str], read: set[str]) -> None:
        schema = call.operator._schema
        for argument, value in zip(schema.arguments, call.arguments, strict=True):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and _names(value) & self.given:
                raise Mixed(f"{schema.name} writes into what the model is given, or holds")
        views = any(returned.alias_info is not None for returned in schema.returns)
        if views and read & self.given:
            self.given.update(outputs)

    def _place(self, call: Call, outputs: list[str], read: set[str]) -> int | None:
        if call.operator in SETS:
            return self._shown(call, outputs[0])
        self._check_numbers(call, read, outputs)
        if not read <= self.samples.keys():
            raise Mixed(
                f"{call.operator._schema.name} reads memory in another way than it was written"
            )
        arguments = [self._value(value) for value in call.arguments]
        size = self.recording.layouts[outputs[0]].size if outputs else ()
        if all(self.samples[name] is None for name in read):
            return repeated(call.operator, arguments, size, self.count)
        return dimension_of_samples(call.operator, arguments, size, self.count)

    def _check_numbers(self, call: Call, read: set[str], outputs: list[str]) -> None:
        layouts = self.recording.layouts
        dtypes = ([layouts[name].dtype for name in names] for names in (read, outputs))
        check_numbers(call.operator, *dtypes)

    def _value(self, value: Any) -> Any:
        if isinstance(value, Ref):
            constant = self.recording.constants.get(value.name)
            size = self.recording.layouts[value.name].size if constant is None else constant.shape
            return Held(tuple(size), self.samples[value.name])
        return tuple(self._value(item) for item in value) if isinstance(value, tuple) else value

    def _shown(self, call: Call, output: str) -> int | None:
        """A tensor of the same size and strides as that whose memory it shows."""
        source, layouts = self.shown.get(call.arguments[1].name, ""), self.recording.layouts
        if not source or call.arguments[2] or layouts[source][:2] != layouts[output][:2]:
            raise Mixed("memory is shown in another way than it was written")
        return self.samples[source]

    def results(self) -> list[Result]:
        found = []
        for leaf in tree_flatten(self.recording.result)[0]:
            if isinstance(leaf, Ref):
                size, stride, qparams, dtype = self.recording.layouts[leaf.name]
                if qparams is not None or 0 in stride:
                    raise Mixed("a result is a quantized tensor, or repeats its memory")
                found.append(Result(size, stride, dtype, self.samples[leaf.name]))
        return found


def _names(value: Any) -> set[str]:
    return {leaf.name for leaf in tree_flatten(value)[0] if isinstance(leaf, Ref)}


def _outputs(call: Call) -> list[str]:
    found: list[str] = []
    for output in call.outputs:
        found += [output] if isinstance(output, str) else output or ()
    return found
