"""A ``state_dict`` into a reference model: all of it is checked before anything is copied.

1. A value is met under any key of its slot; a scale or zero point without one takes that of its group.
2. Shapes agree, but for the one scale of a tensor, which stands for all channels, too.
3. Scales are finite and above 0, zero points and integers are in the range of the description, no float is
   NaN; a dtype may differ where no value changes. What is not read here (a scale that another one stands for,
   one that PyTorch keeps and does not use) is no NaN and no wrong scale either.
4. Missing and unexpected keys are refused, or, with ``strict=False``, left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import fx, nn

from backquant.checkpoint.plain import no_tensors, plain_state
from backquant.checkpoint.slots import Kind, Slot, slots_of
from backquant.convert import ReferenceModel, reference_state
from backquant.dtypes import QParams
from backquant.errors import UsageError, without_prefix
from backquant.graph import rebuilt, set_module, shallow_copy
from backquant.lower.qdq import is_quantize, qparams_of
from backquant.prepare import with_state

_SHOWN = 5
_SCALE = re.compile(r"(?:\.scale|_scale_\d+)$")
_WHERE = "load_state_dict"
_SAME = (
    "prepare and convert with the model, QConfigMapping and backend that it was saved with: a layer's "
    "scale is part of the state_dict"
)
_AGAIN = "save it again, from a model of the same backend that runs: torch.save(quantized.state_dict(), path)"


@dataclass(frozen=True)
class Loaded:
    """``reference``: a copy with the values. ``missing`` and ``unexpected``: keys, as PyTorch lists them."""

    reference: ReferenceModel
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def with_state_dict(
    reference: ReferenceModel, state: Mapping[str, Any], *, strict: bool = True
) -> Loaded:
    """A copy of ``reference`` with the values of ``state``: ours, or of a model that ``torch.ao`` converted.

    Neither argument is changed, and the copy shares nothing that was loaded. Raises UsageError, by key, for
    a state of another model (rules 2 to 4).
    """
    plain, slots = plain_state(state), slots_of(reference)
    values, missing, unexpected = _matched(slots, plain)
    problems = [f"{key}: {kind}, which is no tensor" for key, kind in no_tensors(state)]
    problems += [f"{key}: missing" for key in missing] if strict else []
    problems += [f"{key}: unexpected" for key in unexpected] if strict else []
    fitted: list[tuple[Slot, torch.Tensor]] = []
    for slot, value in values:
        found = _fitted(slot, value)
        if isinstance(found, str):
            problems.append(f"{slot.key}: {found}")
        else:
            fitted.append((slot, found))
    read = {id(value) for _, value in values}
    unread = ((key, value) for key, value in plain.items() if id(value) not in read)
    for key, value in unread:
        is_one = _SCALE.search(key) is not None
        is_scale = is_one or key.endswith("_scale")
        several = is_scale and (value.numel() != 1 if is_one else value.dim() > 1)
        found = f"shape {list(value.shape)}" if several else _unsound(value, is_scale=is_scale)
        problems += [f"{key}: {found}"] if found else []
    if problems:
        fix = without_prefix(plain, [key for slot in slots for key in slot.keys])
        raise _refused(problems, len(slots), fix or (_SAME if missing or unexpected else _AGAIN))
    return Loaded(_with_values(reference, fitted), tuple(missing), tuple(unexpected))


def _matched(
    slots: list[Slot], state: Mapping[str, torch.Tensor]
) -> tuple[list[tuple[Slot, torch.Tensor]], list[str], list[str]]:
    """Rule 1: each slot with its value; keys without one; keys that no slot has."""
    by_group: dict[tuple[str, Kind], torch.Tensor] = {}
    open_slots: list[Slot] = []
    found: list[tuple[Slot, torch.Tensor]] = []
    used: set[str] = set()
    for slot in slots:
        key = next((key for key in slot.keys if key in state), None)
        if key is None:
            open_slots.append(slot)
            continue
        used.update(slot.keys)
        found.append((slot, state[key]))
        if slot.group:
            by_group.setdefault((slot.group, slot.kind), state[key])
    missing: dict[tuple[str, Kind], str] = {}
    for slot in open_slots:
        value = by_group.get((slot.group, slot.kind))
        if value is not None:
            found.append((slot, value))
        elif not slot.kept:  # of a group the first one, from which the others follow
            missing.setdefault((slot.group or slot.key, slot.kind), slot.key)
    owners = {slot.key.rpartition(".")[0] for slot in slots if slot.path}
    unexpected = [
        key
        for key, value in state.items()
        if key not in used and not _is_unread(key, value, owners, used)
    ]
    return found, [*missing.values()], unexpected


def _is_unread(key: str, value: torch.Tensor, owners: set[str], used: set[str]) -> bool:
    """Whether it is the output of a layer that gives floats here, or the zeros that an engine packs where
    there is no bias."""
    owner, _, name = key.rpartition(".")
    if name == "bias":
        return f"{owner}.weight" in used and not bool(value.any())
    return name in ("scale", "zero_point") and owner in owners


def _fitted(slot: Slot, value: torch.Tensor) -> torch.Tensor | str:
    """The value as the slot holds it; or, in words, why it cannot."""
    own = slot.value
    if value.numel() == 1 and slot.kind in (Kind.SCALE, Kind.ZERO_POINT):
        value = value.reshape(()).expand(own.shape)  # rule 2
    if value.shape != own.shape:
        return f"shape {list(value.shape)}, and the model has {list(own.shape)}"
    unsound = _unsound(value, is_scale=slot.kind is Kind.SCALE)
    if unsound:
        return unsound
    if slot.kind is Kind.TENSOR and isinstance(own, nn.Parameter) and bool(value.isinf().any()):
        return "infinity"
    if slot.kind in (Kind.INTEGERS, Kind.ZERO_POINT):
        if value.is_floating_point() and bool((value != value.round()).any()):
            return f"{value.dtype}, and the model has {own.dtype}"
        outside = (value < slot.low) | (value > slot.high)
        if bool(outside.any()):
            span = f"[{slot.low}, {slot.high}]"
            return f"{_first(value, outside)} is outside of {span}, which this description supports"
    cast = value.to(own.dtype)
    if value.dtype != own.dtype and not torch.equal(cast.to(value.dtype), value):
        return f"{value.dtype}, and the model has {own.dtype}"
    return cast.to(own.device, copy=True).contiguous()


def _unsound(value: torch.Tensor, *, is_scale: bool) -> str:
    """What of rule 3 no value may be; empty: nothing."""
    if value.is_floating_point() and bool(value.isnan().any()):
        return "NaN"
    wrong = ~(value.isfinite() & (value > 0))
    return f"a scale of {_first(value, wrong)}" if is_scale and bool(wrong.any()) else ""


def _first(value: torch.Tensor, wrong: torch.Tensor) -> Any:
    return value[wrong].flatten()[0].item()


def _refused(problems: list[str], count: int, fix: str) -> UsageError:
    rest = len(problems) - _SHOWN
    lines = problems[:_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
    return UsageError(
        f"this state_dict does not fit: {len(problems)} of {max(count, len(problems))} values, "
        "nothing was loaded",
        where=f"{_WHERE}: " + "; ".join(lines),
        fix=fix,
    )


def _with_values(
    reference: ReferenceModel, values: list[tuple[Slot, torch.Tensor]]
) -> ReferenceModel:
    made = rebuilt(ReferenceModel, reference, shallow_copy(reference))
    graphs: dict[str, ReferenceModel] = {"": made}
    for path, module in list(made.named_modules()):
        if path and isinstance(module, ReferenceModel):
            graphs[f"{path}."] = rebuilt(ReferenceModel, module, module)
            set_module(made, path, graphs[f"{path}."])
    for slot, value in values:
        if slot.path:
            owner, _, name = slot.path.rpartition(".")
            _set(made.get_submodule(owner), name, value)
    numbers: dict[tuple[str, str], dict[int, float]] = {}
    for slot, value in values:
        if not slot.path:
            numbers.setdefault((slot.owner, slot.node), {})[slot.position] = value.item()
    for owner, module in graphs.items():
        _set_numbers(module, {node: n for (own, node), n in numbers.items() if own == owner})
    for owner, module in graphs.items():
        for call in module.graph.find_nodes(op="call_module"):
            inner = graphs.get(f"{owner}{call.target}.")
            if inner is not None:
                _carry(call, inner)
    return made


def _carry(call: fx.Node, inner: ReferenceModel) -> None:
    """Integers that pass from a graph to a standalone module and back stand for the same on both sides."""
    given: dict[Any, Any] = {**dict(enumerate(call.args)), **call.kwargs}
    for i, place in enumerate(inner.graph.find_nodes(op="placeholder")):
        source = given.get(i, given.get(str(place.target)))
        if isinstance(source, fx.Node) and is_quantize(source):
            _read_as(place, qparams_of(source))
    _set_inputs(inner)
    returned = inner.graph.output_node().args[0]
    items = {i: user for user in call.users if user.target is getitem for i in user.args[1:]}
    readers = [(returned, call)] if isinstance(returned, fx.Node) else []
    if isinstance(returned, (tuple, list)):
        readers = [(value, items[i]) for i, value in enumerate(returned) if i in items]
    for value, reader in readers:
        if isinstance(value, fx.Node) and is_quantize(value):
            _read_as(reader, qparams_of(value))


def _read_as(source: fx.Node, qparams: QParams) -> None:
    for user in list(source.users):
        if "dequantize_per_tensor" in str(user.target):
            user.args = (source, qparams.scale, qparams.zero_point, *user.args[3:])


def _set_inputs(module: ReferenceModel) -> None:
    """Write what the graph reads its arguments as into the record."""
    state = reference_state(module)
    inputs = dict(state.inputs)
    for i, place in enumerate(module.graph.find_nodes(op="placeholder")):
        read = [user for user in place.users if "dequantize_per_tensor" in str(user.target)]
        if read and inputs.get(i) is not None:
            inputs[i] = qparams_of(read[0])
    with_state(module, replace(state, inputs=inputs))


def _set(module: nn.Module, name: str, value: torch.Tensor) -> None:
    before = module._parameters.get(name)
    if before is None:
        module._buffers[name] = value
    else:
        module._parameters[name] = nn.Parameter(value, requires_grad=before.requires_grad)


def _set_numbers(module: ReferenceModel, numbers: Mapping[str, Mapping[int, float]]) -> None:
    """Write qparams into the graph, in quantize and the dequantize nodes after them, and the record."""
    state = reference_state(module)
    qparams, outputs = dict(state.qparams), dict(state.outputs)
    for node in module.graph.nodes:
        if node.name not in numbers:
            continue
        before = qparams_of(node)
        arguments = list(node.args)
        for position, number in numbers[node.name].items():
            arguments[position] = number
        node.args = tuple(arguments)
        after = qparams_of(node)
        _read_as(node, after)
        site = state.keys[node.name].site if node.name in state.keys else ""
        if site in qparams:
            own = qparams[site]
            scale, zero_point = torch.tensor(after.scale), torch.tensor(after.zero_point)
            qparams[site] = replace(own, scale=scale, zero_point=zero_point)
        returned = {user for user in node.users if user.op == "output"}
        if returned:
            outputs.update({place: after for place, q in outputs.items() if q == before})
    with_state(module, replace(state, qparams=qparams, outputs=outputs))
    _set_inputs(module)
