"""Quantized tensors that a recording passes on.

Between kernels stand plain integers; those that run on quantized tensors make one from their input and
show their result as integers. A recording of two such kernels in a row makes a quantized tensor of what one
shows already: here the second reads the first's result as it is, and views that nothing reads go.

Why that is equal for any input: the two quantized tensors have the same integers, since both are a copy or a
view of the same memory; the same scale and zero point; and the same sizes and strides, so that a kernel takes
the same way through them. And nothing writes into that memory, so that a copy is what was copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.utils._pytree import tree_flatten, tree_unflatten

from backquant.runtime.replay.kinds import (
    AS_STRIDED,
    COPY,
    REPLAYED_AS,
    SETS,
    WITHOUT_EFFECT,
)
from backquant.runtime.replay.record import Call, Recording, Ref


def pass_on(recording: Recording) -> Recording:
    """``recording`` without the views between kernels on quantized tensors. Cost: linear."""
    found = _Pass(recording)
    for call in recording.calls:
        found.visit(call)
    return found.finish()


class _Pass:
    def __init__(self, recording: Recording) -> None:
        self.old = recording
        self.layouts = recording.layouts
        self.calls: list[Call] = []
        self.made_by: dict[str, Call] = {}
        self.renamed: dict[str, str] = {}
        # from the name of a plain integer tensor to that of the quantized tensor with the same memory
        self.quantized: dict[str, str] = {}
        self.written = written(recording)

    def visit(self, call: Call) -> None:
        call = replace(call, arguments=tuple(self._renamed(value) for value in call.arguments))
        output = call.outputs[0] if len(call.outputs) == 1 else None
        if isinstance(output, str):
            known = self._known(call, output)
            if known is not None:
                self.renamed[output] = known
                return
            self._note_view(call, output)
        self.calls.append(call)
        for output in call.outputs:
            for name in _names(output):
                self.made_by[name] = call

    def _renamed(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(self.renamed.get(value.name, value.name))
        if isinstance(value, tuple):
            return tuple(self._renamed(item) for item in value)
        return value

    def _viewed(self, call: Call) -> str | None:
        """What ``set_`` of a flat view shows as a whole: the tensor below."""
        if call.operator not in SETS or call.arguments[2] != 0:
            return None
        flat = self.made_by.get(call.arguments[1].name)
        if flat is None or flat.operator is not AS_STRIDED:
            return None
        source: str = flat.arguments[0].name
        layout = self.layouts[source]
        whole = (tuple(call.arguments[3]), tuple(call.arguments[4])) == layout[:2]
        return source if whole else None

    def _note_view(self, call: Call, output: str) -> None:
        source = self._viewed(call)
        if source is None or self.layouts[source].qparams is None:
            return
        if source not in self.written:
            self.quantized[output] = source

    def _known(self, call: Call, output: str) -> str | None:
        """The quantized tensor that is there already, of what the call would make one."""
        source = call.arguments[0].name if call.operator is COPY else self._viewed(call)
        known = self.quantized.get(source) if source is not None else None
        if known is None or self.layouts[output].qparams is None:
            return None
        return known if self.layouts[known] == self.layouts[output] else None

    def finish(self) -> Recording:
        result = _map_refs(self.old.result, self._renamed)
        needed = {ref.name for ref in _refs(result)}
        kept: list[Call] = []
        for call in reversed(self.calls):
            names = {name for output in call.outputs for name in _names(output)}
            if call.operator in WITHOUT_EFFECT and not names & needed:
                continue
            kept.append(call)
            needed |= {ref.name for ref in _refs(call.arguments)}
        return replace(
            self.old,
            calls=kept[::-1],
            result=result,
        )


def written(recording: Recording) -> set[str]:
    """The tensors of ``recording`` whose memory an operator writes into, as its schema says.

    ``set_`` shows memory, and writes nothing. Cost: linear.

    >>> import torch
    >>> from backquant.runtime.replay.record import record
    >>> _, recording = record(lambda x: (x + 1).view(-1).relu_() * 2, (torch.ones(1, 2),), {}, list)
    >>> sorted(written(recording))
    ['%1', '%2', '%3']
    """
    memory: dict[str, str] = {}
    found: set[str] = set()
    for call in recording.calls:
        schema = REPLAYED_AS.get(call.operator, call.operator)._schema
        shown = [r.name for r in _refs(call.arguments[1:2])] if call.operator in SETS else []
        for argument, value in zip(schema.arguments, call.arguments, strict=True):
            if argument.alias_info is None or call.operator in SETS:
                continue
            shown += [ref.name for ref in _refs(value)]
            if argument.alias_info.is_write:
                found.update(memory.get(ref.name, ref.name) for ref in _refs(value))
        for name in (n for output in call.outputs for n in _names(output)):
            if shown:
                memory[name] = memory.get(shown[0], shown[0])
    return {name for name in recording.layouts if memory.get(name, name) in found}


def _names(output: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if isinstance(output, tuple):
        return output
    return () if output is None else (output,)


def _refs(value: Any) -> list[Ref]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Ref)]


def _map_refs(value: Any, change: Callable[[Any], Any]) -> Any:
    leaves, structure = tree_flatten(value)
    return tree_unflatten([change(leaf) for leaf in leaves], structure)
