"""What the ``state_dict`` of a converted model holds, declared once: its keys, and where each value is.

The keys are PyTorch's. A weight is integers with scales and zero points beside them; the qparams of
activations are numbers in the graph of the reference model, and tensors here.

1. ``conv.weight``, ``conv.weight_scale``, ``conv.weight_zero_point``, ``conv.bias``: of a fused module, too.
2. ``conv.scale``, ``conv.zero_point``: the output of a layer with tensors that reads integers, or of an
   activation with a scale.
3. ``conv_input_scale_0``, ``_scale_0``: any other value, as PyTorch's reference model names it;
   ``x_scale_0``: an input ``x`` that arrives as integers, or a value ``x`` that leaves as such.
4. ``_packed_weight_0_weight``, ``_weight_scale``, ``_weight_zero_point``: a weight that is passed to a
   function, where PyTorch has an object of its engine.

A slot is also met under the keys of PyTorch's engines, as ``plain_state`` writes them, and under those of the
reference model: ``w_quantized_0``, ``w_scale_0``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import fx, nn

from backquant.convert import ReferenceModel, reference_state
from backquant.identifiers import label
from backquant.lower.qdq import dynamic_input, is_described_quantize, is_quantize, qparams_of
from backquant.nn.quantized.reference.integer_weights import IntegerWeights
from backquant.prepare.record import Record

_SCALED = (nn.Hardswish, nn.ELU, nn.LeakyReLU, nn.Softmax, nn.SiLU, nn.GELU, nn.Mish)
_DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"
_STORED = "_quantized_"
# functions whose weight PyTorch packs
_PACKING = ("linear", *(f"conv{t}{n}d" for t in ("", "_transpose") for n in (1, 2, 3)))


class Kind(Enum):
    """What a value has to be."""

    INTEGERS = "integers"
    SCALE = "scale"
    ZERO_POINT = "zero point"
    TENSOR = "tensor"


@dataclass(frozen=True)
class Slot:
    """One value. ``keys``: ours first. It is the tensor at ``path``, or, where that is empty, the argument
    ``position`` of the node ``node`` in the graph of the (standalone) module ``owner``.

    ``low`` and ``high``: the range of integers and zero points. ``group``: values with one observer have
    the same; a slot without a value takes that of its group. ``kept``: it may keep what it has.
    """

    keys: tuple[str, ...]
    kind: Kind
    value: torch.Tensor
    path: str = ""
    owner: str = ""
    node: str = ""
    position: int = 0
    low: int = 0
    high: int = 0
    group: str = ""
    kept: bool = False

    @property
    def key(self) -> str:
        """The key in a ``state_dict`` of ours."""
        return self.keys[0]


def slots_of(reference: fx.GraphModule, owner: str = "") -> list[Slot]:
    """The slots of a reference model in the decomposed dialect, and of standalone modules in it."""
    inner = {
        path: module
        for path, module in reference.named_modules()
        if path and isinstance(module, ReferenceModel)
    }
    own = _Graph(reference, owner)
    found = [*own.literals(), *own.tensors(tuple(f"{path}." for path in inner))]
    for path, module in inner.items():
        found += slots_of(module, f"{owner}{path}.")
    return found if owner else [_with_own_names(slot) for slot in found]


def _with_own_names(slot: Slot) -> Slot:
    """The user's own names come first, before those that a graph can hold."""
    return replace(slot, keys=tuple(dict.fromkeys((*map(label, slot.keys), *slot.keys))))


class _Graph:
    """One graph. ``functional``: the keys of weights that are passed to functions, by the path of the
    stored tensor."""

    def __init__(self, module: fx.GraphModule, owner: str) -> None:
        self.module, self.owner = module, owner
        self.state: Record = reference_state(module)
        nodes = module.graph.nodes
        self.called = {str(node.target) for node in nodes if node.op == "call_module"}
        self.functional: dict[str, list[str]] = {}
        for path, key in _functional_weights(module.graph, self.state):
            self.functional.setdefault(path, []).append(key)

    def literals(self) -> Iterator[Slot]:
        """Rules 2 and 3, and the scales of functional weights that have one."""
        for node in self.module.graph.nodes:
            if node.name in self.state.keys and (is_quantize(node) or is_described_quantize(node)):
                yield from self._literal(node)
            elif str(node.target) == _DEQUANTIZE and node.args[0].op == "get_attr":
                stored = str(node.args[0].target)
                yield from self._numbers(node, self._weight_keys(stored), 1, f"weight {stored}")
            elif self._is_of_input(node):
                name = node.args[0].target
                keys = [(f"{name}_scale_0", f"{name}_zero_point_0")]
                yield from self._numbers(node, keys, 1, f"input {name}")
            elif is_quantize(node) and any(user.op == "output" for user in node.users):
                yield from self._of_output(node)

    def _of_output(self, node: fx.Node) -> Iterator[Slot]:
        """A result that leaves as integers because it was asked for."""
        value: Any = node.args[0]
        is_scaled = value.op == "call_module" and _has_scale(
            self.module.get_submodule(value.target)
        )
        keys = [(f"{value.name}_scale_0", f"{value.name}_zero_point_0")]
        if is_scaled:
            keys = [(f"{value.target}.scale", f"{value.target}.zero_point")]
        yield from self._numbers(node, keys, 1, f"{self.owner}output {node.name}")

    def _is_of_input(self, node: fx.Node) -> bool:
        """Whether it reads an argument that arrives as integers; a standalone module's are its caller's."""
        is_read = str(node.target) == _DEQUANTIZE and node.args[0].op == "placeholder"  # type: ignore[union-attr]
        return is_read and not self.owner

    def _literal(self, node: fx.Node) -> Iterator[Slot]:
        key, value = self.state.keys[node.name], node.args[0]
        keys = [(f"{key.stem}_scale_{key.number}", f"{key.stem}_zero_point_{key.number}")]
        assert isinstance(value, fx.Node)
        if value.op == "call_module" and not key.number:
            path = str(value.target)
            own = (f"{path}.scale", f"{path}.zero_point")
            is_own = _reads_integers(value) and _has_scale(self.module.get_submodule(path))
            keys.insert(0 if is_own else 1, own)
        yield from self._numbers(node, keys, _first(node), f"{self.owner}{key.group}")

    def _numbers(
        self, node: fx.Node, keys: list[tuple[str, str]], first: int, group: str
    ) -> Iterator[Slot]:
        found, known = qparams_of(node), self.state.keys.get(node.name)
        values = torch.tensor(found.scale), torch.tensor(found.zero_point)
        for place, kind in enumerate((Kind.SCALE, Kind.ZERO_POINT)):
            yield Slot(
                tuple(self.owner + pair[place] for pair in keys),
                kind,
                values[place],
                owner=self.owner,
                node=node.name,
                position=first + place,
                low=found.quant_min,
                high=found.quant_max,
                group=group,
                kept=known is not None and known.fixed,
            )

    def _weight_keys(self, stored: str) -> list[tuple[str, str]]:
        own = tuple(stored.replace(_STORED, part) for part in ("_scale_", "_zero_point_"))
        theirs = self.functional.get(stored, [])
        ends = [(f"{key}.weight_scale", f"{key}.weight_zero_point") for key in theirs]
        return [*ends, (own[0], own[1])]

    def tensors(self, elsewhere: tuple[str, ...]) -> Iterator[Slot]:
        """Rules 1 and 4; ``elsewhere``: the standalone modules."""
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            start = f"{prefix}." if prefix else ""
            if elsewhere and start.startswith(elsewhere):
                continue
            for name in (*module._parameters, *module._buffers):
                value = module._parameters.get(name, module._buffers.get(name))
                stored = value is not None and name not in module._non_persistent_buffers_set
                if value is not None and stored and not _is_of_halves(module, name):
                    yield self._tensor(start, module, name, value)

    def _tensor(self, start: str, module: nn.Module, name: str, value: torch.Tensor) -> Slot:
        path, kind, low, high = start + name, Kind.TENSOR, 0, 0
        keys = [path, *_engine_keys(start, module, name)]
        if start.endswith(".0.") and start[:-3] in self.called:  # the first of a fused module
            keys = [key.replace(start, start[:-2], 1) for key in keys]
        if isinstance(module, IntegerWeights):
            kind, low, high = _of_weight(module, name)
        elif path in self.functional and _STORED in path:
            kind, (low, high) = Kind.INTEGERS, _bounds(value.dtype)
            keys = [*_of_function(self.functional[path], "weight"), *keys]
        elif path in self.functional:
            keys = [*_of_function(self.functional[path], _part(path)), *keys]
            kind = {"weight_scale": Kind.SCALE, "weight_zero_point": Kind.ZERO_POINT}.get(
                _part(path), kind
            )
            low, high = _bounds(torch.int8)
        if value.is_floating_point() and kind in (Kind.INTEGERS, Kind.ZERO_POINT):
            kind = Kind.TENSOR  # weights kept in half; zero points of embeddings
        keys = [self.owner + key for key in keys]
        optional = name == "num_batches_tracked"
        return Slot(tuple(keys), kind, value, self.owner + path, low=low, high=high, kept=optional)


def _is_of_halves(module: nn.Module, name: str) -> bool:
    """Whether it is the scale or zero point, which mean nothing, of a weight that is kept in float16."""
    weight = name.removesuffix("_scale").removesuffix("_zero_point")
    if not isinstance(module, IntegerWeights) or weight == name:
        return False
    return module.get_buffer(weight).is_floating_point()


def _of_function(packed: Iterable[str], part: str) -> Iterator[str]:
    """Ours, names of the root, and those of PyTorch's packed weights that were unpacked."""
    for end in ("_", "."):
        yield from (f"{key}{end}{part}" for key in packed)


def _part(path: str) -> str:
    for part in ("scale", "zero_point"):
        if f"_{part}_" in path:
            return f"weight_{part}"
    return "bias"


def _functional_weights(graph: fx.Graph, state: Record) -> Iterator[tuple[str, str]]:
    """Path of a stored tensor, and the key of the engine's object that PyTorch packs it into."""
    numbers: Counter[str] = Counter()
    for node in graph.nodes:
        packs = node.op == "call_function" and getattr(node.target, "__name__", "") in _PACKING
        weight = node.args[1] if packs and len(node.args) > 1 else None
        read = weight.all_input_nodes if isinstance(weight, fx.Node) else []
        stored = [n for n in read if n.op == "get_attr"]
        if not stored or "dequantize" not in str(weight.target):  # type: ignore[union-attr]
            continue
        scope = state.scopes.get(node.name)
        stem = f"{'' if scope is None else scope.path.replace('.', '_')}_packed_weight_"
        key = f"{stem}{numbers[stem]}"
        numbers[stem] += 1
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        if isinstance(bias, fx.Node) and bias.op == "get_attr":
            stored.append(bias)
        for tensor in stored:
            yield str(tensor.target), key


def _first(node: fx.Node) -> int:
    """The position of the scale among the arguments."""
    if str(node.target).startswith("backquant.requantize"):
        return 3
    return 1


def _reads_integers(call: fx.Node) -> bool:
    """Whether it is no layer between floats, whose result has a scale elsewhere, as in PyTorch."""
    source = next(iter(call.all_input_nodes), None)
    return "dequantize" in str(getattr(source, "target", "")) and dynamic_input(source) is None


def _has_scale(module: nn.Module) -> bool:
    return isinstance(module, _SCALED) or next(iter(module.state_dict()), None) is not None


def _bounds(dtype: torch.dtype) -> tuple[int, int]:
    if dtype.is_floating_point or dtype == torch.bool:
        return 0, 0
    info = torch.iinfo(dtype)
    return info.min, info.max


def _of_weight(module: IntegerWeights, name: str) -> tuple[Kind, int, int]:
    for weight in module.weight_names:
        low, high = (int(vars(module)[f"{weight}_quant_{end}"]) for end in ("min", "max"))
        found: Mapping[str, Kind] = {
            weight: Kind.INTEGERS,
            f"{weight}_scale": Kind.SCALE,
            f"{weight}_zero_point": Kind.ZERO_POINT,
        }
        if name in found:
            return found[name], low, high
    return Kind.TENSOR, 0, 0


def _engine_keys(start: str, module: nn.Module, name: str) -> Iterator[str]:
    """The keys that a recurrent layer's tensor has where PyTorch's engine packed it."""
    if isinstance(module, nn.RNNCellBase):
        kind, _, end = name.removesuffix("_scale").removesuffix("_zero_point").partition("_")
        part = "bias" if kind == "bias" else name.replace(f"weight_{end}", "weight", 1)
        yield f"{start}_packed_weight_{end}.{part}"
    elif isinstance(module, nn.RNNBase) and "_l" in name:
        kind, _, rest = name.partition("_l")
        layer, _, end = rest.partition("_")
        reverse = end.startswith("reverse")
        number = int(layer) * (2 if module.bidirectional else 1) + reverse
        rest = end.removeprefix("reverse").removeprefix("_") if reverse else end
        yield f"{start}_all_weight_values.{number}.{kind}{'_' if rest else ''}{rest}"
    elif start.endswith("activation_post_process."):
        yield f"{start.removesuffix('activation_post_process.')}{name}"


def values_of(slots: list[Slot], shown: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """The ``state_dict`` that these slots are.

    ``shown``: that of the model in PyTorch's dialect. Its values are those of its reader, who may have
    changed them; a number that it lacks, and that follows from another one or is fixed, has no key.
    """
    if shown is None:
        return {slot.key: slot.value for slot in slots}
    groups = {slot.group for slot in slots if slot.key in shown}
    found: dict[str, Any] = {}
    for slot in slots:
        if slot.key in shown:
            value = shown[slot.key]
            found[slot.key] = value if slot.path else value.to(slot.value.dtype)
        elif slot.path or not (slot.kept or slot.group in groups):
            found[slot.key] = slot.value
    return found
