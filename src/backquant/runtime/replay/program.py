"""A recording as a graph of torch's own interpreter.

The graph runs as it is written: no optimisation merges or reorders what writes into memory that its
schema does not name (oneDNN's accumulating convolution does).

The graph's text form is the one that ``interpreter`` reads: numbers, numbered values, and names and types of
the operators' schemas. Texts, devices, tensors and packed weights enter as objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from backquant.graph import interception
from backquant.runtime.replay.record import REPLAYED_AS, Call, NotReplayable, Recording, Ref

# torch's own graph interpreter, from the text form of a graph.
#
# What this takes is private to torch and stands here alone. Where a version of torch lacks it, models run
# without recordings: ``Replays.refused`` says so.


_NEEDED = (
    "FloatType",
    "TensorType",
    "_create_function_from_graph",
    "_get_graph_executor_optimize",
    "_jit_pass_constant_propagation",
    "_set_graph_executor_optimize",
    "parse_ir",
)
_missing = ", ".join(f"torch._C.{name}" for name in _NEEDED if not hasattr(torch._C, name))


def unavailable() -> str:
    """Why nothing can be recorded with this version of torch; empty if it can."""
    lacking = _missing or interception.missing
    return lacking and f"torch {torch.__version__} has no {lacking}: calls are not recorded"


def interpreted(source: str, embedded: list[Any]) -> Callable[..., Any]:
    """The function of the graph ``source``, whose last inputs are the constants ``embedded``.

    >>> text = "graph(%x : Tensor, %y : Tensor):\\n  %z : Tensor = aten::mul(%x, %y)\\n  return (%z)"
    >>> interpreted(text, [torch.tensor(2.0)])(torch.tensor(3.0))
    tensor(6.)
    """
    graph = torch._C.parse_ir(source)
    _embed(graph, embedded)
    torch._C._jit_pass_constant_propagation(graph)
    made: Callable[..., Any] = torch._C._create_function_from_graph("forward", graph)
    return made


def run_as_written(function: Callable[..., Any], tensors: list[torch.Tensor]) -> Any:
    """Call what ``interpreted`` made, without the optimisations of torch's executor.

    What ``torch.jit.optimized_execution`` does, which takes several times as long.
    """
    setting: Any = torch._C
    before = setting._get_graph_executor_optimize()
    setting._set_graph_executor_optimize(False)
    try:
        return function(*tensors)
    finally:
        setting._set_graph_executor_optimize(before)


def _embed(graph: Any, values: list[Any]) -> None:
    """The last inputs of ``graph`` become constants."""
    if not values:
        return
    first = next(iter(graph.nodes()))
    graph.setInsertPoint(first)
    places = list(enumerate(graph.inputs()))
    for value in reversed(values):
        place, parameter = places.pop()
        parameter.replaceAllUsesWith(_constant(graph, value, first))
        graph.eraseInput(place)


def _constant(graph: Any, value: Any, first: Any) -> Any:
    if isinstance(value, (torch.ScriptObject, torch.device, str)):
        return graph.insertConstant(value)
    node = graph.create("prim::Constant")
    if isinstance(value, torch.Tensor):
        node.t_("value", value.detach())
        node.output().setType(torch._C.TensorType.get())
    else:
        node.f_("value", value)
        node.output().setType(torch._C.FloatType.get())
    node.insertBefore(first)
    return node.output()


_SCALAR_TYPES = {
    name: number
    for number, name in enumerate(
        (
            torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
            torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
            torch.bool, torch.qint8, torch.quint8, torch.qint32, torch.bfloat16,
        )
    )
}  # fmt: skip
_LAYOUTS = {torch.strided: 0}
_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}


class Program:
    """What a recording did, for inputs of the same shapes, dtypes and strides.

    >>> from backquant.runtime.replay.record import record
    >>> _, recording = record(lambda x: {"y": torch.relu(x) + 1}, (torch.ones(1),), {}, list)
    >>> Program(recording)([torch.tensor([-2.0])])
    {'y': tensor([1.])}
    """

    def __init__(self, recording: Recording) -> None:
        leaves, self._structure = tree_flatten(recording.result)
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Ref)]
        self._leaves = leaves
        names = [leaves[i].name for i in self._places]
        if not names:
            raise NotReplayable("no tensor in the result")
        self._function = _compiled(recording, names)
        self._single = len(leaves) == 1 and leaves[0] is recording.result
        fixed = _fixed(recording)
        self._copied = [i for i, name in enumerate(names) if name in fixed]

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        """The result for the flattened tensor arguments."""
        found = run_as_written(self._function, tensors)
        if self._single:
            return found.clone() if self._copied else found
        found = found if len(self._places) > 1 else (found,)
        if self._copied:
            found = [v.clone() if i in self._copied else v for i, v in enumerate(found)]
        leaves = list(self._leaves)
        for place, value in zip(self._places, found, strict=True):
            leaves[place] = value
        return tree_unflatten(leaves, self._structure)


def _fixed(recording: Recording) -> set[str]:
    """The tensors that depend on no input: the graph holds them, and callers get copies."""
    fixed = set(recording.constants)
    for call in recording.calls:
        read = {leaf.name for leaf in tree_flatten(call.arguments)[0] if isinstance(leaf, Ref)}
        if read <= fixed:
            for output in call.outputs:
                fixed.update((output,) if isinstance(output, str) else output or ())
    return fixed


def _compiled(recording: Recording, results: list[str]) -> Callable[..., Any]:
    text = _Text()
    lines = [line for call in recording.calls for line in text.call(call)]
    constants = list(recording.constants)
    inputs = [f"{name} : Tensor" for name in (*recording.inputs, *constants)]
    inputs += [f"{name} : float" for name in text.unwritable]
    inputs += [f"{name} : {kind}" for name, (kind, _) in text.objects.items()]
    body = "\n  ".join((*text.literals, *lines))
    if len(results) > 1:
        types = ", ".join(["Tensor"] * len(results))
        body += f"\n  %results : ({types}) = prim::TupleConstruct({', '.join(results)})"
        results = ["%results"]
    source = f"graph({', '.join(inputs)}):\n  {body}\n  return ({results[0]})\n"
    objects = [packed for _, packed in text.objects.values()]
    embedded = [*recording.constants.values(), *text.unwritable.values(), *objects]
    return interpreted(source, embedded)


class _Text:
    """The lines of a graph; each literal is written once, before the operators."""

    def __init__(self) -> None:
        self.literals: list[str] = []
        self.unwritable: dict[str, float] = {}
        self.objects: dict[str, tuple[str, torch.ScriptObject | torch.device | str]] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._made = 0

    def _new(self, prefix: str) -> str:
        self._made += 1
        return f"%{prefix}{self._made}"

    def call(self, call: Call) -> list[str]:
        """The lines of one operator."""
        operator = REPLAYED_AS.get(call.operator, call.operator)
        schema = operator._schema
        lists: list[str] = []
        arguments = [
            self._value(value, str(argument.type), lists)
            for argument, value in zip(schema.arguments, call.arguments, strict=True)
        ]
        outputs, unpacked = [], []
        for output, returned in zip(call.outputs, schema.returns, strict=True):
            name = output if isinstance(output, str) else self._new("unread")
            outputs.append(f"{name} : {_spelled(str(returned.type))}")
            if isinstance(output, tuple):
                parts = ", ".join(f"{part} : Tensor" for part in output)
                unpacked.append(f"{parts} = prim::ListUnpack({name})")
        line = f"{', '.join(outputs)} = {schema.name}({', '.join(arguments)})"
        return [*lists, line, *unpacked]

    def _value(self, value: Any, kind: str, lists: list[str]) -> str:
        if isinstance(value, Ref):
            return value.name
        if value is None:
            return self._literal("NoneType", "")
        if isinstance(value, str):
            return self._embedded("str", value)
        if isinstance(value, torch.device):
            return self._embedded("Device", value)
        if isinstance(value, torch.ScriptObject):
            return self._object(value, kind)
        if isinstance(value, tuple):
            return self._list(value, _without(kind, "Optional["), lists)
        return self._number(value, _without(kind, "Optional["))

    def _embedded(self, kind: str, value: str | torch.device) -> str:
        """A text or a device: first an input of the graph, so that no text of a model is in the text form."""
        key = (kind, str(value))
        if key not in self._names:
            self._names[key] = self._new("text")
            self.objects[self._names[key]] = kind, value
        return self._names[key]

    def _object(self, value: torch.ScriptObject, kind: str) -> str:
        """A packed weight: first an input of the graph, since the text form cannot hold it."""
        name = f"%packed{id(value)}"
        self.objects[name] = kind, value
        return name

    def _list(self, values: tuple[Any, ...], kind: str, lists: list[str]) -> str:
        inner = _without(kind, "List[")
        parts = [self._value(value, inner, lists) for value in values]
        made = f"{_spelled(kind)} = prim::ListConstruct({', '.join(parts)})"
        if any(isinstance(value, Ref) for value in values):
            name = self._new("list")
            lists.append(f"{name} : {made}")
            return name
        key = ("list", made)
        if key not in self._names:
            name = self._names[key] = self._new("list")
            self.literals.append(f"{name} : {made}")
        return self._names[key]

    def _number(self, value: Any, kind: str) -> str:
        for known in (_SCALAR_TYPES, _LAYOUTS, _MEMORY_FORMATS):
            if value in known:
                return self._literal("int", str(known[value]))
        if isinstance(value, bool):
            return self._literal("bool", str(int(value)))
        if isinstance(value, int) and kind != "float":
            return self._literal("int", str(value))
        if isinstance(value, (int, float)):
            return self._float(float(value))
        raise NotReplayable(f"an argument of the kind {kind}")

    def _float(self, value: float) -> str:
        if math.isfinite(value):
            text = repr(value)
            return self._literal("float", text if "." in text or "e" in text else f"{text}.")
        name = self._new("unwritable")
        self.unwritable[name] = value
        return name

    def _literal(self, kind: str, text: str) -> str:
        key = (kind, text)
        if key not in self._names:
            name = self._names[key] = self._new("literal")
            value = f"[value={text}]" if text else ""
            self.literals.append(f"{name} : {kind} = prim::Constant{value}()")
        return self._names[key]


def _without(kind: str, prefix: str) -> str:
    return kind[len(prefix) : -1] if kind.startswith(prefix) else kind


def _spelled(kind: str) -> str:
    """A type of a schema as the text form has it.

    >>> _spelled("List[Optional[number]]"), _spelled("Optional[Tensor]")
    ('Scalar?[]', 'Tensor?')
    """
    if kind.startswith("List["):
        return _spelled(_without(kind, "List[")) + "[]"
    if kind.startswith("Optional["):
        return _spelled(_without(kind, "Optional[")) + "?"
    return {"number": "Scalar", "SymInt": "int"}.get(kind, kind)
