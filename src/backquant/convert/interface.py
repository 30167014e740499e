"""Inputs that arrive quantized and outputs that leave quantized (PrepareCustomConfig).

1. In the ``"quantized_tensor"`` dialect they are PyTorch's quantized tensors, which carry their
   qparams.
2. In the ``"decomposed"`` dialect they are plain integer tensors. The qparams of an input are those
   that its observer measured, or that the parent of a standalone module passes; those of an output
   are its own. ``Record.inputs`` and ``.outputs`` tell them (of an output inside of a dict
   or list under ``"0.key"``).
3. An output that is computed in float stays float, and the plan notes it (PyTorch says nothing).
4. A dict counts as output 0, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from backquant.convert.contracts import inputs_are_dequantized
from backquant.convert.dialects import is_dequantize
from backquant.convert.state import Conversion, ReferenceModel, reference_state
from backquant.dtypes import QParams
from backquant.errors import ConfigError, UsageError, did_you_mean, literal
from backquant.graph import (
    GraphEditor,
    contract,
    get_module,
    register_quantized_decomposed,
    returning,
    verify,
)
from backquant.graph.clone import with_own_state
from backquant.graph.example import ExampleSpec
from backquant.operators import moves_values
from backquant.prepare import QUANTIZED_INPUT, Record, with_state
from backquant.qconfig import PrepareCustomConfig


@contract(ensures=[inputs_are_dequantized])
def dequantize_inputs(work: Conversion) -> set[str]:
    """Dequantize the inputs that arrive quantized; returns the sites that are gone.

    Raises ConfigError when nothing tells what the integers of an input stand for.
    """
    custom = work.prepared.custom
    inputs = [node for node in work.module.graph.nodes if node.op == "placeholder"]
    gone: set[str] = set()
    for index in dict.fromkeys(custom.input_quantized_indexes if custom is not None else ()):
        if index >= len(inputs) or (work.passed is not None and index not in work.passed):
            continue  # the parent passes it as float
        node = inputs[index]
        qparams = _described_qparams(work, index, node)
        site = f"{QUANTIZED_INPUT}{index}"
        if site in work.prepared.sites:
            observer = work.nodes[site]
            observer.replace_all_uses_with(node)
            work.editor.erase(observer)
            gone.add(site)
        insert_dequantize(work, node, qparams)
        work.inputs[index] = qparams
    return gone


def _described_qparams(work: Conversion, index: int, node: fx.Node) -> QParams | None:
    if work.dialect == "quantized_tensor":
        return None
    if work.passed is not None:
        return work.passed[index]
    site = f"{QUANTIZED_INPUT}{index}"
    if site not in work.prepared.sites:
        raise ConfigError(
            "nothing measured what the integers of a quantized input stand for",
            where=f"PrepareCustomConfig.set_input_quantized_indexes, input {node.name!r}",
            fix="prepare with prepare_fx, or convert with dialect='quantized_tensor'",
        )
    return work.qparams[site].number


def insert_dequantize(work: Conversion, node: fx.Node, qparams: QParams | None) -> fx.Node:
    """Dequantize the value of ``node`` for all who read it; ``None``: it is a quantized tensor."""
    with work.editor.graph.inserting_after(node):
        if qparams is None:
            dequantized = work.editor.graph.call_method("dequantize", (node,))
        else:
            register_quantized_decomposed()
            target = torch.ops.quantized_decomposed.dequantize_per_tensor.default
            dequantized = work.editor.graph.call_function(target, (node, *qparams.literals))
    work.editor.replace_uses(node, dequantized)
    work.editor.provenance.record(dequantized.name, (node.name,))
    return dequantized


def plain_qparams(dequantized: fx.Node) -> QParams | None:
    """What the integers below a dequantize node stand for; ``None`` if the tensor tells it.

    >>> graph = fx.Graph()
    >>> plain_qparams(graph.call_method("dequantize", (graph.placeholder("q"),))) is None
    True
    """
    if dequantized.op == "call_method":
        return None
    return _qparams(dequantized)


def keep_outputs_quantized(work: Conversion) -> None:
    """Leave out the last dequantize of the outputs that were named.

    Raises ConfigError for an index that is no output.
    """
    custom = work.prepared.custom
    if custom is None or not custom.output_quantized_indexes:
        return
    output = next(node for node in reversed(work.module.graph.nodes) if node.op == "output")
    returned = output.args[0]
    several = isinstance(returned, (list, tuple))
    entries: list[Any] = list(returned) if several else [returned]
    for index in dict.fromkeys(custom.output_quantized_indexes):
        if index >= len(entries):
            raise ConfigError(
                f"output {index} is to stay quantized, and the model has {len(entries)} outputs",
                where="PrepareCustomConfig.set_output_quantized_indexes",
                fix=f"one of {', '.join(map(str, range(len(entries))))}",
            )
        before = len(work.outputs)
        entries[index] = _below_dequantize(work, entries[index], index)
        if len(work.outputs) == before:
            note = f"output {index} is to stay quantized, and is computed in float"
            work.plan = replace(work.plan, notes=(*work.plan.notes, note))
    output.args = (type(returned)(entries) if several else entries[0],)


def _below_dequantize(work: Conversion, value: Any, label: int | str) -> Any:
    """``value`` below its dequantize nodes, which are noted in ``work.outputs`` by label."""
    if _is_static_dequantize(value):
        work.outputs[label] = plain_qparams(value)
        return value.args[0]
    if isinstance(value, dict):
        return {
            key: _below_dequantize(work, inner, f"{label}.{key}") for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        entries = enumerate(value)
        return type(value)(_below_dequantize(work, inner, f"{label}.{i}") for i, inner in entries)
    return value


def _is_static_dequantize(value: Any) -> bool:
    if not is_dequantize(value):
        return False
    static = torch.ops.quantized_decomposed.dequantize_per_tensor.default
    return value.op == "call_method" or value.target is static


# Integers at the inputs and outputs of a reference model, in place of floats.
#
# The last step of a conversion: calibration and what corrects a model see floats at its edges.
#
# 1. An input has the qparams that its first static reader quantizes it with, or those that were passed. Who
#    quantizes it with the same reads the integers; all others read them dequantized.
# 2. An output that is dequantized last is returned without that. Where its values are only moved after it,
#    or were left in float since nothing quantized reads them, they are quantized, as they were measured.
# 3. What no operator quantizes is refused by name. An output of a ``PrepareCustomConfig`` stays float then,
#    and a note says so.


#: What the integers of an input are: as its reader quantizes it, of this dtype, or as these say.
Wish = bool | torch.dtype | QParams
_DTYPES = {torch.uint8: (0, 255), torch.int8: (-128, 127), torch.int16: (-32768, 32767)}
_QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"
_FIX = (
    'integer_io=True, {"x": True} (an input by name), {0: True} (an output by position),\n'
    '{"x": torch.uint8}, or {"x": (1 / 255, 0, torch.uint8)}: scale, zero point, dtype'
)


@dataclass(frozen=True)
class IntegerEdges:
    """Which inputs (by name) and outputs (by position) are integers; ``None``: all. ``is_custom``: as a
    ``PrepareCustomConfig`` says, inputs by position, or a target: what cannot be integers stays float.

    >>> IntegerEdges.of({"x": True, 0: True})
    IntegerEdges(inputs={'x': True}, outputs=frozenset({0}), is_custom=False)
    """

    inputs: Mapping[str | int, Wish] | None = None
    outputs: frozenset[int] | None = None
    is_custom: bool = False

    @classmethod
    def of(cls, wish: Any) -> IntegerEdges | None:
        """Of the argument ``integer_io``. Raises ``UsageError`` for what says nothing of the kind."""
        if wish is None or wish is False:
            return None
        if wish is True:
            return cls()
        if not isinstance(wish, Mapping) or not wish:
            raise UsageError(
                f"integer_io is {wish!r}, and no inputs and outputs", where="integer_io", fix=_FIX
            )
        inputs: dict[str | int, Wish] = {
            key: _wish(key, value) for key, value in wish.items() if isinstance(key, str)
        }
        places = [key for key in wish if not isinstance(key, str)]
        for place in places:
            if type(place) is not int or place < 0 or wish[place] is not True:
                raise UsageError(
                    f"integer_io has {place!r}: {wish[place]!r}, which is no output",
                    where="integer_io",
                    fix=_FIX,
                )
        return cls(inputs, frozenset(places))

    @classmethod
    def of_custom(cls, custom: PrepareCustomConfig | None) -> IntegerEdges | None:
        """What a custom config says; ``None`` where that is nothing.

        >>> IntegerEdges.of_custom(PrepareCustomConfig()) is None
        True
        """
        if custom is None:
            return None
        inputs, outputs = custom.input_quantized_indexes, custom.output_quantized_indexes
        if not inputs and not outputs:
            return None
        return cls(dict.fromkeys(inputs, True), frozenset(outputs), is_custom=True)

    def wants_output(self, index: int) -> bool:
        """Whether this output is to be integers."""
        return self.outputs is None or index in self.outputs


def _wish(name: str, value: Any) -> Wish:
    if value is True or (isinstance(value, torch.dtype) and value in _DTYPES):
        return value
    if isinstance(value, QParams) and value.storage in _DTYPES and value.axis is None:
        return value.number
    if isinstance(value, tuple) and len(value) == 3 and value[2] in _DTYPES and float(value[0]) > 0:
        low, high = _DTYPES[value[2]]
        if low <= int(value[1]) <= high:
            return QParams(float(value[0]), int(value[1]), low, high, value[2])
    raise UsageError(
        f"integer_io[{literal(name)}] is {value!r}", where=f"integer_io, input {name!r}", fix=_FIX
    )


@dataclass
class EdgeQParams:
    """What the integers of inputs and outputs stand for, by position."""

    inputs: dict[int, QParams | None] = field(default_factory=dict)
    outputs: dict[int | str, QParams | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def integer_edges(integer_io: Any, custom: PrepareCustomConfig | None) -> IntegerEdges | None:
    """What the two arguments of a call ask for. Raises ``UsageError`` where both say something.

    >>> integer_edges(True, None)
    IntegerEdges(inputs=None, outputs=None, is_custom=False)
    """
    edges, own = IntegerEdges.of(integer_io), IntegerEdges.of_custom(custom)
    if edges is not None and own is not None:
        raise UsageError(
            "integer_io and prepare_custom_config both say which inputs and outputs are integers",
            where="integer_io",
            fix="leave set_input_quantized_indexes and set_output_quantized_indexes out",
        )
    return own if edges is None else edges


def with_integer_edges(reference: ReferenceModel, edges: IntegerEdges | None) -> ReferenceModel:
    """``reference``, changed in place; the notes of its plan say what the integers stand for.

    Raises ``ConfigError`` that names an input or an output that cannot be integers.
    """
    if edges is None:
        return reference
    state = reference_state(reference)
    found = keep_integers(reference, edges, state)
    verify(reference, after="pass 'integer edges'")
    plan = state.plan.noted(*found.notes)
    keys = {node.name for node in reference.graph.nodes} & state.keys.keys()
    made = replace(
        state,
        plan=plan,
        inputs=found.inputs,
        outputs=found.outputs,
        keys={name: state.keys[name] for name in state.keys if name in keys},
    )
    with_state(reference, made)
    return reference


def measured_outputs(work: Conversion) -> dict[int | str, QParams]:
    """What the results of quantized operators were measured to be that the model returns, by their labels."""
    found: dict[int | str, QParams] = {}
    for label, value in _labelled(work.module.graph.output_node().args[0]):
        if value.name not in work.prepared.sites:
            continue
        site = work.prepared.sites[value.name]
        qparams = work.qparams[site.group]
        single = qparams.scale is not None and not qparams.per_channel and qparams.axis is None
        if single and qparams.storage in _DTYPES and work.quantized(site.producer):
            found[label] = qparams.number
    return found


def _labelled(returned: Any) -> Iterator[tuple[int | str, fx.Node]]:
    several = isinstance(returned, (list, tuple))
    for index, entry in enumerate(returned if several else [returned]):
        yield from _leaves(entry, index)


def _leaves(value: Any, label: int | str) -> Iterator[tuple[int | str, fx.Node]]:
    if isinstance(value, fx.Node):
        yield label, value
    elif isinstance(value, (dict, list, tuple)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, f"{label}.{key}")


def keep_integers(module: fx.GraphModule, edges: IntegerEdges, known: Record) -> EdgeQParams:
    """Give a graph of quantize and dequantize nodes these edges, in place; ``known``: of its inputs and
    outputs. Raises as ``with_integer_edges``."""
    register_quantized_decomposed()
    editor, found = GraphEditor(module), EdgeQParams()
    _give_integers(editor, edges, known, found)
    placeholders = module.graph.find_nodes(op="placeholder")
    for index, node, wish in _wanted_inputs(list(placeholders), edges):
        qparams = _input_qparams(node, wish)
        if qparams is None:
            held = _held(known.example, index, _name(node))
            if edges.inputs is None and (edges.is_custom or not _is_float(held)):
                continue
            raise _float_input(node, held)
        _take_integers(editor, node, qparams)
        found.inputs[index] = qparams
        found.notes.append(f"input {_name(node)!r} takes {_told(qparams)}")
    editor.finish()
    return found


def _name(node: fx.Node) -> str:
    return str(node.target).lstrip("*")


def _told(qparams: QParams) -> str:
    """
    >>> _told(QParams(0.5, 3, 0, 255, torch.uint8))
    'uint8 from 0 to 255: (integer - 3) * 0.5'
    """
    dtype = str(qparams.dtype).removeprefix("torch.")
    values = f"(integer - {qparams.zero_point}) * {qparams.scale!r}"
    return f"{dtype} from {qparams.quant_min} to {qparams.quant_max}: {values}"


# -- inputs -------------------------------------------------------------------------------------------------


def _wanted_inputs(
    placeholders: list[fx.Node], edges: IntegerEdges
) -> Iterator[tuple[int, fx.Node, Wish]]:
    names = [_name(node) for node in placeholders]
    if edges.inputs is None:
        yield from ((i, node, True) for i, node in enumerate(placeholders) if node.users)
        return
    for key, wish in edges.inputs.items():
        index = names.index(key) if isinstance(key, str) and key in names else key
        if isinstance(index, str):
            raise UsageError(
                f"the model has no input {key!r}",
                where="integer_io",
                fix=did_you_mean(key, names, f"one of {', '.join(names)}"),
            )
        if index >= len(placeholders):
            raise ConfigError(
                f"input {index} is to arrive quantized, and the model has {len(placeholders)} inputs",
                where="PrepareCustomConfig.set_input_quantized_indexes",
                fix=f"one of {', '.join(map(str, range(len(placeholders))))}",
            )
        yield index, placeholders[index], wish


def _input_qparams(node: fx.Node, wish: Wish) -> QParams | None:
    """Rule 1; ``None`` where no reader tells."""
    if isinstance(wish, QParams):
        return wish
    read = next((_qparams(user) for user in node.users if _quantizes(user)), None)
    if read is None or isinstance(wish, bool) or read.dtype == wish:
        return read
    if torch.int16 in (wish, read.dtype):
        return None  # integers of another width
    (low, high), shift = _DTYPES[wish], 128 if wish == torch.uint8 else -128
    ends = max(low, read.quant_min + shift), min(high, read.quant_max + shift)
    return QParams(read.scale, read.zero_point + shift, *ends, wish)


def _quantizes(node: fx.Node) -> bool:
    literal_args = len(node.args) == 6 and not any(isinstance(a, fx.Node) for a in node.args[1:])
    return str(node.target) == _QUANTIZE and literal_args and node.args[5] in _DTYPES


def _qparams(node: fx.Node) -> QParams:
    literals: tuple[Any, ...] = node.args[1:6]
    scale, zero_point, low, high, dtype = literals
    return QParams(float(scale), int(zero_point), int(low), int(high), dtype)


def _held(example: ExampleSpec | None, index: int, name: str) -> Any:
    """What is known of an input, as ``ExampleSpec`` has it."""
    if example is None:
        return None
    return example.args[index] if index < len(example.args) else example.kwargs.get(name)


def _is_float(held: Any) -> bool:
    """Whether an input is, or holds, a tensor of floats.

    >>> _is_float({"tensor": [1], "dtype": "int64"}), _is_float(None), _is_float(3)
    (False, True, False)
    """
    if isinstance(held, dict):
        if "dtype" in held:
            return bool(getattr(torch, held["dtype"]).is_floating_point)
        return any(map(_is_float, held.values()))
    return any(map(_is_float, held)) if isinstance(held, list) else held is None


def _float_input(node: fx.Node, held: Any) -> ConfigError:
    readers = ", ".join(user.name for user in list(node.users)[:3]) or "nothing"
    low, high = held.get("range", (0.0, 1.0)) if isinstance(held, dict) else (0.0, 1.0)
    low, high = min(low, 0.0), max(high, 0.0)
    scale = float(f"{(high - low) / 255 or 1.0:.6g}")
    return ConfigError(
        f"input {_name(node)!r} cannot arrive as integers: no quantized operator reads it",
        where=f"integer_io, input {_name(node)!r}, read in float by {readers}",
        fix=f"integer_io={{{literal(_name(node))}: ({scale!r}, {round(-low / scale)}, torch.uint8)}}"
        "   # scale, zero point, dtype",
    )


def _take_integers(editor: GraphEditor, node: fx.Node, qparams: QParams) -> None:
    for user in list(node.users):
        if _quantizes(user) and _qparams(user).literals == qparams.literals:
            user.replace_all_uses_with(node)
            editor.erase(user)
    others = [user for user in node.users if not is_dequantize(user)]
    others += [
        user
        for user in node.users
        if is_dequantize(user) and tuple(user.args[1:6]) != qparams.literals
    ]
    if not others:
        return
    target: Any = torch.ops.quantized_decomposed.dequantize_per_tensor.default
    with editor.graph.inserting_after(node):
        made = editor.graph.call_function(target, (node, *qparams.literals))
    for user in others:
        user.replace_input_with(node, made)
    editor.provenance.record(made.name, (node.name,))


# -- outputs ------------------------------------------------------------------------------------------------


def _give_integers(
    editor: GraphEditor, edges: IntegerEdges, known: Record, found: EdgeQParams
) -> None:
    output = editor.graph.output_node()
    returned: Any = output.args[0]
    count = len(returned) if isinstance(returned, (list, tuple)) else 1
    for index in sorted(edges.outputs or ()):
        if index >= count:
            raise _no_output(edges, index, count)
    wished = [
        (label, value, _output_qparams(editor.module, value, known.measured_outputs.get(label)))
        for label, value in _labelled(returned)
        if edges.wants_output(int(str(label).partition(".")[0]))
    ]
    unknown = dict.fromkeys(value for _, value, qparams in wished if qparams is None)
    if edges.outputs is None:
        unknown = dict.fromkeys(_float_values(editor.module, unknown, known.example))
    given: dict[fx.Node, fx.Node] = {}
    for label, value, qparams in wished:
        if qparams is None:
            if value not in unknown:
                continue
            if not edges.is_custom:
                raise _float_output(editor.graph, value, label)
            found.notes.append(f"output {label} is to stay quantized, and is computed in float")
            continue
        found.outputs[label] = qparams
        found.notes.append(f"output {label} is {_told(qparams)}")
        given[value] = _quantized(editor, value, qparams)
    output.args = fx.map_arg(output.args, lambda node: given.get(node, node))
    editor.graph.eliminate_dead_code()


def _float_values(
    module: fx.GraphModule, values: Collection[fx.Node], example: ExampleSpec | None
) -> set[fx.Node]:
    """The returned nodes that give floats on the example inputs, as far as is known: in one call."""
    if example is None or not values:
        return set(values)
    args, kwargs = example.arguments()
    probe = returning(module, list(values))
    try:
        with torch.no_grad(), with_own_state(probe):
            results = probe(*args, **kwargs)
    except Exception:  # then nothing is known
        return set(values)
    return {
        value
        for value, result in zip(values, results, strict=True)
        if not isinstance(result, torch.Tensor) or result.is_floating_point()
    }


def _no_output(edges: IntegerEdges, index: int, count: int) -> ConfigError:
    own = "PrepareCustomConfig.set_output_quantized_indexes"
    return ConfigError(
        f"output {index} is to stay quantized, and the model has {count} outputs",
        where=own if edges.is_custom else f"integer_io, output {index}",
        fix=f"one of {', '.join(map(str, range(count)))}",
    )


def _output_qparams(
    module: fx.GraphModule, value: fx.Node, measured: QParams | None
) -> QParams | None:
    """Rule 2."""
    source = _moved(module, value)
    if is_dequantize(source) and len(source.args) == 6 and source.args[5] in _DTYPES:
        return _qparams(source)
    return measured


def _quantized(editor: GraphEditor, value: fx.Node, qparams: QParams) -> fx.Node:
    """The integers of ``value``; of a dequantize node those that it reads."""
    if is_dequantize(value) and tuple(value.args[1:6]) == qparams.literals:
        return value.all_input_nodes[0]
    target: Any = torch.ops.quantized_decomposed.quantize_per_tensor.default
    with editor.graph.inserting_before(editor.graph.output_node()):
        made = editor.graph.call_function(target, (value, *qparams.literals))
    editor.provenance.record(made.name, (value.name,))
    return made


def _moved(module: fx.GraphModule, value: fx.Node) -> fx.Node:
    """The node whose values ``value`` only moves."""
    while len(value.all_input_nodes) == 1:
        is_module = value.op == "call_module"
        called = type(get_module(module, str(value.target))) if is_module else value.target
        if not moves_values(called):
            break
        value = value.all_input_nodes[0]
    return value


def _float_output(graph: fx.Graph, value: fx.Node, label: int | str) -> ConfigError:
    names = [_name(node) for node in graph.find_nodes(op="placeholder") if node.users]
    inputs = ", ".join(f"{literal(name)}: True" for name in names)
    return ConfigError(
        f"output {label} cannot be integers: {value.name!r} computes it in float",
        where=f"integer_io, output {label}, node {value.name!r}",
        fix=f"integer_io={{{inputs}}}   # this output stays float",
    )
