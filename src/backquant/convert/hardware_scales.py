"""Scales and biases as the description says that the hardware has them.

1. Where a match asks for power-of-two scales, what was measured becomes the next power of two above, so
   that the measured range still fits; an affine zero point moves with it.
2. A bias with ``bias_scale: input_times_weight`` is rounded to integers of that scale, and is what the
   reference model adds. A module that is called with several input scales keeps its bias.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from backquant.convert.state import Conversion
from backquant.dtypes import ObservedQParams, integer_range
from backquant.graph import get_module
from backquant.match.plan import Match
from backquant.prepare import Role

__all__ = ["asks_for_powers", "powers_of_two", "round_biases", "snapped_dict"]


def powers_of_two(work: Conversion) -> dict[str, ObservedQParams]:
    """``work.qparams`` with the activations (and weights of functions) that need it snapped; rule 1."""
    asked = work.powers_of_two
    found = dict(work.qparams)
    if not asked:
        return found
    anchors: dict[str, list[str]] = {}
    for match in work.plan.matches:
        for reader in match.readers:
            anchors.setdefault(reader, []).append(match.anchor)
    for site in work.prepared.sites.sites:
        role = "weight" if site.role is Role.WEIGHT else "input"
        read = (anchor for reader in site.readers for anchor in anchors.get(reader, ()))
        places = {(site.producer, "output"), *((anchor, role) for anchor in read)}
        if site.role is not Role.BIAS and not asked.isdisjoint(places):
            found[site.group] = _snapped(found[site.group])
    return found


def _snapped(found: ObservedQParams) -> ObservedQParams:
    if found.scale is None or found.zero_point is None:
        return found
    scale, zero_point = _power(found.scale, found.zero_point, found.quant_min, found.quant_max)
    return replace(found, scale=scale, zero_point=zero_point)


def _power(
    scale: torch.Tensor, zero_point: torch.Tensor, low: int, high: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next power of two, and the zero point that keeps the lower end of the range."""
    power = torch.exp2(torch.ceil(torch.log2(scale.double()))).to(scale.dtype)
    middle = zero_point == 0
    moved = low - torch.round((low - zero_point) * (scale / power))
    return power, torch.where(middle, zero_point, moved.clamp(low, high).to(zero_point.dtype))


def snapped_dict(qparams: dict[str, Any]) -> dict[str, Any]:
    """The qparams of a weight (of each weight, by its name) on powers of two.

    >>> found = snapped_dict({"scale": torch.tensor(0.3), "zero_point": torch.tensor(0)})
    >>> found["scale"], found["zero_point"]
    (tensor(0.5000), tensor(0))
    """
    if "scale" not in qparams:
        return {k: snapped_dict(v) if isinstance(v, dict) else v for k, v in qparams.items()}
    low, high = qparams.get("quant_min", 0), qparams.get("quant_max", 0)
    scale, zero_point = (torch.as_tensor(qparams[name]) for name in ("scale", "zero_point"))
    scale, zero_point = _power(scale, zero_point, low, high)
    return {**qparams, "scale": scale, "zero_point": zero_point}


def asks_for_powers(work: Conversion, match: Match) -> bool:
    """Whether the weight of a match needs power-of-two scales."""
    return (match.anchor, "weight") in work.powers_of_two


def round_biases(work: Conversion) -> None:
    """Give the reference modules the biases that the hardware adds; rule 2."""
    scales: dict[str, set[float]] = {}
    dtypes: dict[str, torch.dtype] = {}
    inputs = _input_scales(work)
    for match in work.plan.matches:
        decision = work.plan.decisions[match.anchor]
        node = work.nodes[match.root]
        if not decision.quantized or decision.dtype_config is None or node.op != "call_module":
            continue
        config = work.prepared.backend_config.configs[match.entry]
        dtype_config = config.dtype_configs[decision.dtype_config]
        if dtype_config.bias_scale is not None and dtype_config.bias_dtype is not None:
            path = str(node.target)
            scales.setdefault(path, set()).update(inputs.get(match.root, ()))
            dtypes[path] = dtype_config.bias_dtype
    for path, found in scales.items():
        if len(found) == 1:
            _round(work, path, found.pop(), dtypes[path])


def _input_scales(work: Conversion) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for site in work.prepared.sites.sites:
        scale = work.qparams[site.group].scale
        if site.role in (Role.WEIGHT, Role.BIAS) or scale is None or scale.numel() != 1:
            continue
        for reader in site.readers:
            found.setdefault(reader, []).append(float(scale))
    return found


def _round(work: Conversion, path: str, input_scale: float, dtype: torch.dtype) -> None:
    module = get_module(work.module, path)
    part = module[0] if isinstance(module, nn.Sequential) and len(module) else module
    bias, weight_scale = getattr(part, "bias", None), getattr(part, "weight_scale", None)
    limits = integer_range(dtype)
    if bias is None or weight_scale is None or limits is None:
        return
    scale = input_scale * weight_scale.detach().double()
    steps = torch.round(bias.detach().double() / scale).clamp(*map(float, limits))
    own = part._parameters
    part._parameters = {
        **own,
        "bias": nn.Parameter((steps * scale).to(bias.dtype), requires_grad=bias.requires_grad),
    }
