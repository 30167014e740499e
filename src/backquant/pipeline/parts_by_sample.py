"""Into how many parts the input channels of layers are divided whose samples have ranges of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import fx, nn

from backquant.errors import InputError
from backquant.fuse import input_axis
from backquant.graph import check_inputs

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
    layer = weighted(called)
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

    parts = ((name, weighted(called)) for name, called in layers.items())
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


def weighted(called: nn.Module) -> Any:
    """The layer with the weights, of a fused module, too."""
    return called[0] if isinstance(called, nn.Sequential) else called
