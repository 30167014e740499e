"""From a ``torch.export`` program in quantize and dequantize nodes to a ``Network``.

1. An operator whose operands are dequantized integers and whose result is only quantized is computed on
   integers, where LiteRT has such a kernel. A clamp between it and the quantize node is part of it.
2. What a kernel cannot give in the qparams that follow is requantized by an operator of its own.
3. Everything else is computed in float, between DEQUANTIZE and QUANTIZE.
4. What depends on no input is computed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from backquant.deploy.edits import arguments
from backquant.deploy.litert.arithmetic import clamp_after, fused_clamp, is_clamp
from backquant.deploy.litert.emitter import (
    CHANNELS_LAST,
    Call,
    Constant,
    Dequantized,
    Emitter,
    Layout,
    Rule,
    Table,
    UnsupportedError,
    Value,
    plain,
    sizes_of,
    stored,
)
from backquant.deploy.litert.network import DTYPES, Network, Scales, Tensor
from backquant.deploy.program import Program
from backquant.lower.qdq import (
    is_channel_dequantize,
    is_dequantize,
    is_described_quantize,
    is_quantize,
    qparams_of,
)
from backquant.operators import overload

_NAMES = {torch.int8: "INT8", torch.int16: "INT16", torch.uint8: "UINT8"}

#: Of their operand they read the sizes alone.
FILLED = tuple(
    overload(name)
    for name in ("full_like", "ones_like", "zeros_like", "new_full", "new_ones", "new_zeros")
)


@dataclass(eq=False)
class Lowering:
    """One program. ``channels_last``: inputs and outputs of four axes are stored so."""

    program: Program
    table: Table
    channels_last: bool = False
    emitter: Emitter = field(default_factory=Emitter)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    done: set[fx.Node] = field(default_factory=set)

    def run(self) -> Network:
        """Raises ``UnsupportedError``, which names it, at the first node that the format cannot express."""
        graph = self.program.exported.graph
        self._bind_inputs(graph)
        for node in graph.nodes:
            if node.op == "call_function" and node not in self.done:
                self.emitter.node = self.program.origins.get(node.name, "")
                try:
                    self._lower(node)
                except UnsupportedError as error:
                    error.node = node
                    raise
        self.emitter.node = ""
        self._bind_outputs(graph)
        network = self.emitter.network
        network.drop_unread()
        network.name_tensors()
        return network

    # -- edges ----------------------------------------------------------------------------------------

    def _bind_inputs(self, graph: fx.Graph) -> None:
        exported = self.program.exported
        placeholders = list(graph.find_nodes(op="placeholder"))
        for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                if isinstance(node.meta.get("val"), torch.Tensor):
                    self._bind_input(node)
                continue
            target = str(spec.target)
            state: Mapping[str, Any] = exported.state_dict
            held = state[target] if target in state else exported.constants[target]
            self.values[node] = Constant(node.name, held)

    def _bind_input(self, node: fx.Node) -> None:
        layout = self._edge_layout(node)
        dtype = node.meta["val"].dtype
        name = "FLOAT32" if dtype == torch.float64 else DTYPES[dtype]
        made = Tensor(node.name, stored(sizes_of(node), layout), name)
        network = self.emitter.network
        network.inputs.append(made)
        network.input_names.append(node.name)
        if all(is_dequantize(user) for user in node.users) and node.users:
            made.scales = _scales(next(iter(node.users)))
        self.values[node] = Value(made, layout)

    def _edge_layout(self, node: fx.Node) -> Layout:
        rank = len(sizes_of(node))
        return CHANNELS_LAST if self.channels_last and rank == 4 else plain(rank)

    def _bind_outputs(self, graph: fx.Graph) -> None:
        network = self.emitter.network
        [output] = graph.find_nodes(op="output")
        names = iter(self.program.output_names)
        for node in output.args[0]:
            is_tensor = isinstance(node, fx.Node) and isinstance(node.meta["val"], torch.Tensor)
            name = next(names) if is_tensor else ""
            held = self.values.get(node)
            if isinstance(held, Dequantized):
                value = self._output_of(held, self._edge_layout(node))
            elif isinstance(held, Value) and not node.meta["val"].is_floating_point():
                value = held
            elif isinstance(held, (Value, Constant)):
                value = Call(node, self.emitter, self.values).floats(held)
            else:
                continue  # a number
            tensor = self.emitter.laid(value, self._edge_layout(node))
            if tensor in network.inputs or tensor in network.outputs or tensor.data is not None:
                # the runtime wants a tensor for each output
                tensor = self.emitter.copied(tensor, self.emitter.like(tensor))
            network.outputs.append(tensor)
            network.output_names.append(name)

    def _output_of(self, held: Dequantized, layout: Layout) -> Value:
        """Integers are moved before they become floats."""
        if held.integers.layout != layout:
            held = Dequantized(Value(self.emitter.laid(held.integers, layout), layout))
        return self.emitter.dequantize(held.integers)

    # -- nodes ----------------------------------------------------------------------------------------

    def _lower(self, node: fx.Node) -> None:
        if self._is_computed_here(node):
            self._compute(node)
        elif is_quantize(node) or is_described_quantize(node):
            self.values[node] = self._quantized(node)
        elif is_dequantize(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            value = self.values[source]
            self.values[node] = Dequantized(value)
        elif not isinstance(node.meta.get("val"), torch.Tensor):
            self.values[node] = None  # a number; or items, which are written where they are taken
        else:
            self._write(node)

    def _is_computed_here(self, node: fx.Node) -> bool:
        """Rule 4."""
        shape = getattr(node.meta.get("val"), "shape", ())
        if any(isinstance(size, torch.SymInt) for size in shape):
            return False
        read = node.all_input_nodes
        if node.target in FILLED:
            read = read[1:]
        return all(isinstance(self.values.get(source), Constant) for source in read)

    def _compute(self, node: fx.Node) -> None:
        def value(source: fx.Node) -> Any:
            held = self.values[source]
            if isinstance(held, Constant):
                return held.value
            return torch.empty(sizes_of(source), dtype=source.meta["val"].dtype)

        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        kwargs = {name: each for name, each in kwargs.items() if name != "device"}
        with torch.no_grad():
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        if not isinstance(result, torch.Tensor):
            self.values[node] = Constant(node.name, result)
            return
        made = Constant(node.name, result)
        if is_dequantize(node) or is_channel_dequantize(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            made.name = self.values[source].name
            made.integers, made.scales = self.values[source].value, _weight_scales(node, self)
        self.values[node] = made

    def _quantized(self, node: fx.Node) -> Value:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        held = self.values[source]
        if isinstance(held, Dequantized):
            return self._requantized(held.integers, node)
        floats = Call(node, self.emitter, self.values).floats(held)
        return self._requantized(floats, node)

    def _requantized(self, value: Value, node: fx.Node) -> Value:
        return self.emitter.quantize(value, _scales(node), _NAMES[qparams_of(node).dtype])

    def _write(self, node: fx.Node) -> None:
        rule = self.table.get(node.target)
        if rule is None:
            raise UnsupportedError("LiteRT has no operator for it")
        call = Call(node, self.emitter, self.values)
        clamp, quantizers = _readers(node)
        call.columns_allowed = only_linear_layers_read(node)
        if quantizers and self._on_integers(call, rule, quantizers[0]):
            self._write_integers(call, rule, clamp, quantizers)
            return
        if rule.moves and self._moved_integers(call, rule):
            return
        if clamp is not None and rule.fuses:
            activation = fused_clamp(clamp, None)
            if activation is not None:
                call.activation = activation
                self.values[clamp] = rule.write(call)
                self.done.add(clamp)
                return
        self.values[node] = rule.write(call)

    def _moved_integers(self, call: Call, rule: Rule) -> bool:
        """Integers that are only moved become floats where something reads them so."""
        held = [self.values.get(source) for source in _operands(call.node)]
        parts = [each.integers for each in held if isinstance(each, Dequantized)]
        if len(parts) < len(held) or len({(p.tensor.scales, p.tensor.dtype) for p in parts}) != 1:
            return False
        first = parts[0].tensor
        call.integer, call.scales, call.dtype = True, first.scales, first.dtype
        if not rule.integer(call):
            call.integer = False
            return False
        self.values[call.node] = Dequantized(rule.write(call))
        return True

    def _on_integers(self, call: Call, rule: Rule, quantize: fx.Node) -> bool:
        """Rule 1; prepares ``call`` for it."""
        if qparams_of(quantize).dtype not in (torch.int8, torch.int16):
            return False
        operands = [self.values.get(source) for source in _operands(call.node)]
        if not any(isinstance(each, Dequantized) for each in operands):
            return False
        if not all(isinstance(each, (Dequantized, Constant)) for each in operands):
            return False
        call.scales, call.dtype = _scales(quantize), _NAMES[qparams_of(quantize).dtype]
        first = next(each for each in operands if isinstance(each, Dequantized))
        if rule.keeps(call) if callable(rule.keeps) else rule.keeps:
            call.scales, call.dtype = first.integers.tensor.scales, first.integers.tensor.dtype
        if any(
            each.integers.tensor.dtype != call.dtype
            for each in operands
            if isinstance(each, Dequantized)
        ):
            return False
        call.integer = True
        call.integer = bool(rule.integer(call))
        return call.integer

    def _write_integers(
        self, call: Call, rule: Rule, clamp: fx.Node | None, quantizers: Sequence[fx.Node]
    ) -> None:
        activation = None
        if clamp is not None and rule.fuses:
            activation = fused_clamp(clamp, call.scales, call.dtype)
        call.activation = activation or "NONE"
        value = rule.write(call)
        if clamp is not None:
            if activation is None:
                value = clamp_after(self.emitter, clamp, value)
            self.done.add(clamp)
        for quantize in quantizers:
            self.values[quantize] = self._requantized(value, quantize)
            self.done.add(quantize)


def _readers(node: fx.Node) -> tuple[fx.Node | None, list[fx.Node]]:
    """The clamp after ``node``, if nothing else reads it, and the quantize nodes that read either; none where
    something else does, too."""
    users, clamp = list(node.users), None
    if len(users) == 1 and is_clamp(users[0]):
        clamp = users[0]
        users = list(clamp.users)
    if users and all(is_quantize(user) or is_described_quantize(user) for user in users):
        return clamp, users
    return clamp, []


def _operands(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node computes with; the item of a split reads what is split."""
    if getattr(node.target, "__name__", "") == "getitem":
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return list(source.all_input_nodes)
    return [
        source
        for source in node.all_input_nodes
        if isinstance(source.meta.get("val"), torch.Tensor)
        and source.meta["val"].is_floating_point()
    ]


def _scales(node: fx.Node) -> Scales:
    qparams = qparams_of(node)
    return Scales.one(qparams.scale, qparams.zero_point)


def _weight_scales(node: fx.Node, lowering: Lowering) -> Scales:
    if is_dequantize(node):
        return _scales(node)
    given = arguments(node)
    scale, zero_point = (lowering.values[given[name]].value for name in ("scales", "zero_points"))
    return Scales(
        tuple(scale.float().tolist()),
        tuple(int(each) for each in zero_point.tolist()),
        int(given["axis"]),
    )


_MOVING = (
    "relu",
    "dropout",
    "clone",
    "quantize_per_tensor",
    "requantize",
    "quantize_rounded",
    "dequantize_per_tensor",
    "linear",
)


def only_linear_layers_read(node: fx.Node) -> bool:
    """Whether all that reads a value, through clamps and conversions, is a linear layer with a constant
    weight."""
    pending, found = list(node.users), False
    while pending:
        user = pending.pop()
        name = getattr(user.target, "_schema", None)
        name = "" if name is None else name.name.partition("::")[2]
        if name not in _MOVING:
            return False
        if name != "linear":
            pending += list(user.users)
            continue
        weight = user.args[1]
        assert isinstance(weight, fx.Node)
        constant = (
            weight.op == "placeholder" or is_channel_dequantize(weight) or is_dequantize(weight)
        )
        if not constant or user.args[0] is weight or weight is node:
            return False
        found = True
    return found
