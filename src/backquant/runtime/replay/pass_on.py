"""Quantized tensors that a recording passes on.

Between kernels stand plain integers; those that run on quantized tensors make one from their input and
show their result as integers. A recording of two such kernels in a row makes a quantized tensor of what one
shows already: here the second reads the first's result as it is, and views that nothing reads go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.utils._pytree import tree_flatten, tree_unflatten

from backquant.runtime.replay.overloads import AS_STRIDED, COPY, SETS, WITHOUT_EFFECT
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
        if source is not None and self.layouts[source].qparams is not None:
            self.quantized[output] = source

    def _known(self, call: Call, output: str) -> str | None:
        """The quantized tensor that is there already, of what the call would make one."""
        source = call.arguments[0].name if call.operator is COPY else self._viewed(call)
        known = self.quantized.get(source) if source is not None else None
        qparams = self.layouts[output].qparams
        if known is None or qparams is None or self.layouts[known].qparams != qparams:
            return None
        return known

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


def _names(output: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if isinstance(output, tuple):
        return output
    return () if output is None else (output,)


def _refs(value: Any) -> list[Ref]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Ref)]


def _map_refs(value: Any, change: Callable[[Any], Any]) -> Any:
    leaves, structure = tree_flatten(value)
    return tree_unflatten([change(leaf) for leaf in leaves], structure)
