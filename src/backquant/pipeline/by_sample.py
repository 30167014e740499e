"""Finds layers whose input differs so much in size from sample to sample that one static range cannot
serve all.

A static range has to hold the largest sample. A sample whose values are a hundredth of that is left with
two or three of 256 steps, so that its own result is noise. ``quantize`` looks for such layers on the
calibration data, before anything is quantized, of all that no rule of a passed mapping names:

1. The quantized layers whose samples differ so: the worst tenth of the samples lies less than
   ``LEAST_DECIBELS`` over the noise of rounding them in the range of all, and a range of its own would give
   that tenth ``GAIN_DECIBELS`` more. A recipe may ask for more than ``LEAST_DECIBELS``.
2. What these read is scaled sample by sample (``backquant.fuse.taken_apart``): they stay on integers. What
   makes it stays float.
3. Where what such a layer gives is not rounded, its input channels are divided into parts that are scaled by
   themselves, if that gains enough (``parts_by_sample``).

The model runs for this only where its own inputs differ: where ranges of their own would give the worst
tenth of the samples of one of them half of ``GAIN_DECIBELS`` more. (Powers, which layers may read, differ
twice as much as what they are of.) Inputs that are no floats say nothing.

This takes a backend that leaves operators in float by default: the scaling is done in float.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from backquant.calibrate.batches import count_of, samples_of
from backquant.errors import InputError
from backquant.fuse import LAYERS, input_axis, part_name
from backquant.graph import as_arguments, check_inputs, get_module
from backquant.graph.edit import weighted_part
from backquant.match import MatchKind, Plan
from backquant.match.default_rules import ChosenRules, Draft, first_of
from backquant.match.plan import BySample
from backquant.match.scale_rules import float_results

# Into how many parts the input channels of layers are divided whose samples have ranges of their own.


#: What twice as many parts must give the worst tenth of the samples more: one bit.
PART_DECIBELS = 6.0
_LEAST_CHANNELS = 32
_STEPS = 255
_WORST = 0.1
_TINY = 1e-12


def parts_of_channels(
    module: fx.GraphModule,
    layers: Mapping[str, nn.Module],
    batches: Callable[[], Iterable[Any]],
) -> dict[str, int]:
    """Into how many parts the input channels of each layer are divided, by name: into twice as many as long
    as the worst tenth of the samples, by what rounding the input makes of the output, gains
    ``PART_DECIBELS`` by it, and parts keep ``_LEAST_CHANNELS``.
    """
    parts, gained = dict.fromkeys(layers, 1), {name: _errors(layers[name]) for name in layers}
    can_be = {name: called for name, called in layers.items() if len(gained[name]) > 1}

    def note(name: str, part: Any, value: torch.Tensor, result: torch.Tensor) -> None:
        signal = _power(_without_bias(part, result))
        for count, seen in gained[name].items():
            noise = part.forward(_rounding_error(value, count, -part.weight.dim() + 1))
            seen.append(_power(_without_bias(part, noise)) / signal.clamp(min=_TINY))

    if can_be and watched_layers(module, can_be, batches(), note):
        for name in can_be:
            levels = [_worst_level(seen) for seen in gained[name].values()]
            steps = (after - before >= PART_DECIBELS for before, after in pairwise(levels))
            parts[name] = 2 ** sum(takewhile(bool, steps))
    return parts


def _errors(called: nn.Module) -> dict[int, list[torch.Tensor]]:
    """Into how many parts the input channels of a layer can be divided, with nothing known of each."""
    layer: Any = weighted_part(called)
    if getattr(layer, "groups", 1) > 1:
        return {1: []}
    count, found = (
        int(layer.weight.shape[input_axis(layer)]),
        dict[int, list[torch.Tensor]]({1: []}),
    )
    while count >= 2 * max(found) * _LEAST_CHANNELS:
        found[2 * max(found)] = []
    return found


def _rounding_error(value: torch.Tensor, parts: int, axis: int) -> torch.Tensor:
    """What rounding adds where each part of each sample has a range of its own."""
    channels = value.shape[axis]
    sizes = [channels * (i + 1) // parts - channels * i // parts for i in range(parts)]
    steps = _STEPS if float(value.min()) >= 0 else _STEPS / 2
    made = []
    for own in value.split(sizes, axis):
        largest = own.flatten(1).abs().amax(1).clamp(min=_TINY)
        step = largest.reshape(-1, *[1] * (value.dim() - 1)) / steps
        made.append((own / step).round() * step - own)
    return torch.cat(made, axis)


def _without_bias(layer: Any, result: torch.Tensor) -> torch.Tensor:
    if layer.bias is None:
        return result
    after = 0 if isinstance(layer, nn.Linear) else layer.weight.dim() - 2
    bias: torch.Tensor = layer.bias.detach()
    return result - bias.reshape(-1, *[1] * after)


def _power(value: torch.Tensor) -> torch.Tensor:
    return value.flatten(1).square().sum(1)


def _worst_level(seen: Sequence[torch.Tensor]) -> float:
    """Of the worst tenth of the samples, in dB; ``seen``: the noise of each, as a share of its signal."""
    noise = torch.cat(list(seen))
    return float(-10 * torch.log10(noise.quantile(1 - _WORST).clamp(min=_TINY)))


def watched_layers(
    module: fx.GraphModule,
    layers: Mapping[str, nn.Module],
    batches: Iterable[Any],
    note: Callable[[str, Any, torch.Tensor, torch.Tensor], None],
) -> bool:
    """Run ``module`` on all batches, and call ``note`` with the name of each layer that is called, its part
    with the weights, what this reads and what it gives; whether all batches could be run."""

    def watching(name: str, part: Any) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            value = args[0] if args else None
            if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
                return
            if value.dim() >= part.weight.dim() and value.numel():
                note(name, part, value.detach(), result.detach())

        return hook

    parts = ((name, weighted_part(called)) for name, called in layers.items())
    handles = [part.register_forward_hook(watching(name, part)) for name, part in parts]
    try:
        module.recompile()  # a deferred graph module has no signature before
        for batch in batches:
            check_inputs(module, batch)
    except InputError:  # calibration comes to it, and says which batch it is
        return False
    finally:
        for handle in handles:
            handle.remove()
    return True


#: What the worst tenth of the samples must have over the noise of rounding.
LEAST_DECIBELS = 20.0
#: What ranges of their own must give them more: two bits.
GAIN_DECIBELS = 12.0
_PRODUCTS = (torch.matmul, operator.matmul, torch.bmm, "matmul", "bmm")
_CHANNELS = 1000.0
_SAMPLES = 8  # and the worst tenth of fewer says nothing
_BATCHES, _MOST_BATCHES, _ENOUGH = 4, 16, 64


class _Samples(NamedTuple):
    """Of each sample of a batch: its smallest and largest value, and its mean square."""

    low: torch.Tensor
    high: torch.Tensor
    power: torch.Tensor


def layers_by_sample(
    draft: Draft,
    batches: Callable[[], Iterable[Any]],
    least: float = LEAST_DECIBELS,
) -> dict[str, BySample]:
    """The layers whose inputs are to be scaled sample by sample, by the name of their node; ``least``: of
    rule 1. With the largest value of each output channel where the backend would round an output that only
    float operators read. What the request names is not among them."""
    module, plan, backend = draft.module, draft.plan, draft.backend
    by_default = () if backend.defaults is None else backend.defaults.leave_float
    rules = (*by_default, *(() if backend.qdq is None else backend.qdq.leave_float))
    if not rules:
        return {}
    layers = _layers(module, plan)
    if not layers or not _inputs_differ(batches()):
        return {}
    found = _measured(module, layers, batches())
    found = {name: one for name, one in found.items() if _needs_own_ranges(one.seen, least)}
    floats = float_results(plan, draft.graph, backend, rules)
    chosen = {match.root: match.anchor for match in plan.matches}
    whole = {name for name in found if chosen[name] in floats}  # what it gives is not rounded
    parts = parts_of_channels(module, {name: layers[name] for name in whole}, batches)
    return {
        name: BySample(one.axes, () if name in whole else one.sizes(), parts.get(name, 1))
        for name, one in found.items()
        if not draft.is_named(name)
    }


def rules_before_scaling(draft: Draft, layers: Mapping[str, BySample]) -> ChosenRules | None:
    """Rules that leave in float the operators before a scaled value, back to those with weights and matrix
    products: quantized, they would round the value in a single range before it is scaled.
    """
    left = [name for name in _makers(draft.module, layers) if name in draft.places]
    left = [name for name in left if draft.plan.decisions[name].quantized]
    if not left:
        return None
    note = f"{len(left)} stay float before inputs that are scaled ({first_of(left)})"
    return ChosenRules(draft.in_float(left), (note,))


def _makers(module: fx.GraphModule, layers: Mapping[str, BySample]) -> list[str]:
    """What makes the values that are divided for ``layers``, back to what has weights."""
    names = {part_name(name, i) for name, how in layers.items() for i in range(how.parts)}
    nodes = [node for node in module.graph.nodes if node.name in names]
    waiting = [maker for node in nodes for maker in node.all_input_nodes[0].all_input_nodes[:1]]
    found: dict[str, None] = {}
    while waiting:
        node = waiting.pop()
        if node.name in found or node.op not in ("call_function", "call_method", "call_module"):
            continue
        if node.target in _PRODUCTS or _has_weights(module, node):
            continue
        found[node.name] = None
        waiting += node.all_input_nodes
    return list(found)


def _has_weights(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return any(True for _ in get_module(module, str(node.target)).parameters())
    return False


def compared_batches(calibration: Any, example: Any) -> int:
    """How many batches of a set are compared: a quarter of it, so that looking costs little beside
    calibration; but 4 and 64 samples at least, and 16 batches at most. ``example``: one of its batches.

    >>> compared_batches(range(40), torch.zeros(8, 3)), compared_batches(range(8), torch.zeros(1, 3))
    (10, 16)
    >>> compared_batches(range(8), torch.zeros(32, 3))
    4
    """
    samples = samples_of(example)
    quarter = (count_of(calibration) or 0) // 4
    return min(_MOST_BATCHES, max(_BATCHES, quarter, math.ceil(_ENOUGH / samples)))


def scaled_note(paths: Sequence[str]) -> str:
    """What was chosen, for the report.

    >>> scaled_note(["stem"])
    'inputs are scaled sample by sample, as no one range holds all samples of the calibration data: stem'
    """
    why = "as no one range holds all samples of the calibration data"
    return f"inputs are scaled sample by sample, {why}: {first_of(paths)}"


def _layers(module: fx.GraphModule, plan: Plan) -> dict[str, nn.Module]:
    """The modules of quantized layers, by the name of the node that calls them."""
    roots = {match.root for match in plan.matches if match.kind is MatchKind.PATTERN}
    found: dict[str, nn.Module] = {}
    for node in module.graph.nodes:
        if node.op == "call_module" and node.name in roots and plan.decisions[node.name].quantized:
            called = get_module(module, str(node.target))
            if isinstance(weighted_part(called), LAYERS):
                found[node.name] = called
    return found


def _measured(
    module: fx.GraphModule, layers: Mapping[str, nn.Module], batches: Iterable[Any]
) -> dict[str, _Measured]:
    """What the inputs of ``layers`` are like."""
    found: dict[str, _Measured] = {}

    def note(name: str, part: Any, value: torch.Tensor, result: torch.Tensor) -> None:
        one = found.setdefault(name, _Measured(value.dim(), []))
        if one.axes == value.dim():
            one.note(part, value, result)

    return found if watched_layers(module, layers, batches, note) else {}


@dataclass
class _Measured:
    """Of a layer: how many axes its inputs have, what their samples are like, and the largest value of each
    output channel of samples that are divided by their largest value, without the bias."""

    axes: int
    seen: list[_Samples]
    largest: torch.Tensor = field(default_factory=lambda: torch.zeros(()))

    def note(self, part: Any, value: torch.Tensor, result: torch.Tensor) -> None:
        self.seen.append(_samples(value))
        axis = -1 if isinstance(part, nn.Linear) else 1
        rows = result.movedim(axis, 1).flatten(2) if result.dim() > 2 else result[..., None]
        rows = rows if part.bias is None else rows - part.bias.detach()[:, None]
        divisor = value.flatten(1).abs().amax(1).clamp(min=_TINY)
        sizes = rows.abs().amax(2) / divisor[:, None]
        self.largest = torch.maximum(self.largest, sizes.nan_to_num(0.0, 0.0, 0.0).amax(0))

    def sizes(self) -> tuple[float, ...]:
        """The largest value of each channel, but at least a thousandth of the largest of all: new data
        may exceed it."""
        least = self.largest.max() / _CHANNELS
        return tuple(self.largest.clamp(min=float(least)).tolist()) if least > 0 else ()


def _samples(value: torch.Tensor) -> _Samples:
    rows = value.flatten(1)
    low, high = rows.aminmax(dim=1)
    return _Samples(low.clamp(max=0), high.clamp(min=0), rows.square().mean(1))


def _inputs_differ(batches: Iterable[Any]) -> bool:
    """Whether the samples of an input of the model differ enough to look at what layers read."""
    found: dict[int, list[_Samples]] = {}
    for batch in batches:
        for place, value in enumerate(tree_leaves(as_arguments(batch))):
            is_float = isinstance(value, torch.Tensor) and value.dtype is torch.float32
            is_dense = is_float and value.layout is torch.strided
            if is_dense and value.dim() > 1 and value.numel():
                found.setdefault(place, []).append(_samples(value.detach()))
    return any(_worst(seen)[1] >= GAIN_DECIBELS / 2 for seen in found.values())


def _needs_own_ranges(seen: list[_Samples], least: float = LEAST_DECIBELS) -> bool:
    """Rule 1.

    >>> loud = _samples(torch.tensor([[-1.0, 1.0]] * 8))
    >>> quiet = _samples(torch.tensor([[-1e-3, 1e-3]] * 8))
    >>> _needs_own_ranges([loud]), _needs_own_ranges([quiet]), _needs_own_ranges([loud, quiet])
    (False, False, True)
    """
    level, gain = _worst(seen)
    return math.isfinite(level) and level < least and gain >= GAIN_DECIBELS


def _worst(seen: list[_Samples]) -> tuple[float, float]:
    """Two figures for the worst tenth of the samples, in dB: its signal-to-noise ratio when rounded in
    the range of all samples, and how much more each sample's own range would give. Samples of zeros do
    not count; with too few samples ``(inf, 0)``.
    """
    low, high, power = (torch.cat(parts) for parts in zip(*seen, strict=True))
    alive = power > 0
    low, high, power = low[alive], high[alive], power[alive]
    if len(power) < _SAMPLES:
        return math.inf, 0.0
    shared = _decibels(power, high.max() - low.min())
    level = float(shared.quantile(_WORST))
    worst = shared <= level
    own = _decibels(power[worst], high[worst] - low[worst])
    return level, float(own.median()) - float(shared[worst].median())


def _decibels(power: torch.Tensor, span: torch.Tensor) -> torch.Tensor:
    """Signal power over the noise of rounding to steps of ``span``, in dB. The noise is a twelfth of a step's
    square, but no more than the signal itself, which is lost where all becomes zero.
    """
    noise = torch.minimum((span / _STEPS).square() / 12, power)
    return 10 * torch.log10(power / noise.clamp(min=torch.finfo(torch.float32).tiny))
