"""Changes measured qparams into ones that the hardware has, by the constraints of the description.

1. A zero point that is demanded alone: the smallest scale whose range holds what was measured around it.
2. ``scale_range``: moved to its nearest end; values beyond the largest saturate.
3. ``scales``: the smallest of the set that is not below; where all are, it stays, and the plan refuses it.
4. ``power_of_two_scale``: the next power of two above.
5. ``scale_dtype``: as it is stored (``backquant.dtypes.stored_scales``); of groups that are quantized at each
   call the dtype is handed on.
6. ``requantization_ratio``: weights get the scale next above that makes input × weight / output what is
   demanded; ``hardware_ratios`` has raised the output's before.

An affine zero point moves with the scale, so that the lower end of the range stays; one of a symmetric scheme
does not. What several operators demand of a value that they share is met one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from backquant.backend_config import DTypeConfig, DTypeWithConstraints
from backquant.backend_config.dtypes import Ratio
from backquant.convert.contracts import groups_are_measured
from backquant.convert.state import Conversion
from backquant.dtypes import ObservedQParams, is_symmetric, stored_scale
from backquant.graph import contract
from backquant.match.plan import Match
from backquant.match.refusal import chosen_dtype_config
from backquant.prepare import Role

#: A function from the measured qparams of a weight to qparams that the hardware has.
WeightMaker = Callable[[dict[str, Any]], dict[str, Any]]
_Pair = tuple[torch.Tensor, torch.Tensor]
# Scales are float32: a hardware scale that float32 has rounded still counts as that scale.
_SLACK = 1 - 2**-20


@contract(ensures=[groups_are_measured])
def hardware_scales(work: Conversion) -> dict[str, ObservedQParams]:
    """``work.qparams`` with the activations, and weights of functions, as demanded."""
    found = dict(work.qparams)
    demands: dict[tuple[str, str], DTypeWithConstraints] = {}
    anchors: dict[str, list[str]] = {}
    for match in work.plan.matches:
        config = chosen_config(work, match)
        if config is None:
            continue
        for role in ("input", "weight", "output"):
            demand = getattr(config, f"{role}_dtype_with_constraints")
            if demand.produces_scales:
                demands[match.anchor, role] = demand
        for reader in match.readers:
            anchors.setdefault(reader, []).append(match.anchor)
    if not demands:
        return found
    by_group: dict[str, list[DTypeWithConstraints]] = {}
    for site in work.prepared.sites.sites:
        role = "weight" if site.role is Role.WEIGHT else "input"
        read = (anchor for reader in site.readers for anchor in anchors.get(reader, ()))
        places = [(site.producer, "output"), *((anchor, role) for anchor in read)]
        own = by_group.setdefault(site.group, [])
        own += (d for d in map(demands.get, places) if d is not None and d not in own)
    for head, own in by_group.items():
        if own and not work.source.probe(work.prepared.sites[head].spec).fixed:
            found[head] = _produced(found[head], own)
    return found


def chosen_config(work: Conversion, match: Match) -> DTypeConfig | None:
    """The dtype config that a match is quantized by; None if it stays float, or no entry is behind it."""
    return chosen_dtype_config(work.plan, work.prepared.backend_config, match)


def weight_maker(work: Conversion, match: Match) -> WeightMaker | None:
    """What makes other qparams of the weight of a match's module; None: they are as measured."""
    config = chosen_config(work, match)
    demand = None if config is None else config.weight_dtype_with_constraints
    unit = work.ratio_units.get(match.anchor)
    if config is None or demand is None or not (demand.produces_scales or unit is not None):
        return None
    made = partial(produced_dict, demand=demand)
    if unit is None or config.requantization_ratio is None:
        return made
    return partial(_in_ratio, made=made, ratio=config.requantization_ratio, unit=unit.of_weight)


def _in_ratio(
    qparams: dict[str, Any], made: WeightMaker, ratio: Ratio, unit: float
) -> dict[str, Any]:
    found = made(qparams)
    return {**found, "scale": ratio_scale(torch.as_tensor(found["scale"]), ratio, unit)}


def ratio_scale(scale: torch.Tensor, ratio: Ratio, unit: float) -> torch.Tensor:
    """Rule 6; ``unit``: output / input scale.

    >>> ratio_scale(torch.tensor([0.3, 1.0]), "power_of_two", 0.5)
    tensor([0.5000, 1.0000])
    """
    steps = scale.double() / unit
    if ratio == "power_of_two":
        steps = torch.exp2(torch.ceil(torch.log2(steps * _SLACK)))
    elif ratio[0] is not None:
        steps = steps.clamp(min=ratio[0])
    return (steps * unit).to(scale.dtype)


def _produced(found: ObservedQParams, demands: Iterable[DTypeWithConstraints]) -> ObservedQParams:
    if found.scale is None or found.zero_point is None:
        stored = next((d.scale_dtype for d in demands if d.scale_dtype is not None), None)
        return found if stored is None else replace(found, scale_dtype=stored)
    pair = (found.scale, found.zero_point)
    kept = is_symmetric(found.qscheme)
    for demand in demands:
        pair = _met(pair, (found.quant_min, found.quant_max), demand, kept=kept)
    return replace(found, scale=pair[0], zero_point=pair[1])


def produced_dict(qparams: dict[str, Any], demand: DTypeWithConstraints) -> dict[str, Any]:
    """The qparams of a weight (of each weight, by its name) as demanded.

    >>> found = {"scale": torch.tensor(0.3), "zero_point": torch.tensor(0)}
    >>> made = produced_dict(found, DTypeWithConstraints(torch.qint8, power_of_two_scale=True))
    >>> made["scale"], made["zero_point"]
    (tensor(0.5000), tensor(0))
    """
    if "scale" not in qparams:
        parts = qparams.items()
        return {k: produced_dict(v, demand) if isinstance(v, dict) else v for k, v in parts}
    bounds = qparams.get("quant_min", 0), qparams.get("quant_max", 0)
    pair = torch.as_tensor(qparams["scale"]), torch.as_tensor(qparams["zero_point"])
    scale, zero_point = _met(pair, bounds, demand, kept=False)
    return {**qparams, "scale": scale, "zero_point": zero_point}


def _met(
    pair: _Pair, bounds: tuple[int, int], demand: DTypeWithConstraints, *, kept: bool
) -> _Pair:
    """Scale and zero point that satisfy the constraints; ``kept``: the zero point does not move with the
    scale."""
    scale, zero_point = pair
    fixed = demand.zero_point_exact_match
    if fixed is not None and demand.scale_exact_match is None:
        ends = [((end - zero_point) * scale, end - fixed) for end in bounds]
        room = [top / steps for top, steps in ends if steps]
        needed = torch.stack([one.double() for one in room]).amax(0)
        scale = torch.where(needed > 0, needed.to(scale.dtype), scale)
        zero_point, kept = torch.full_like(zero_point, fixed), True
    stored = stored_scale(scale.double(), demand.scale_dtype, bounds[1])
    made = _in_domain(stored, demand).to(scale.dtype)
    ratio = scale / made
    moved = bounds[0] - torch.round((bounds[0] - zero_point) * ratio)
    stays = (zero_point == 0) | (ratio > 1)
    if kept or zero_point.is_floating_point():
        return made, zero_point
    return made, torch.where(stays, zero_point, moved.clamp(*bounds).to(zero_point.dtype))


def _in_domain(scale: torch.Tensor, demand: DTypeWithConstraints) -> torch.Tensor:
    """Rules 2 to 4, in float64."""
    if demand.scale_range is not None:
        scale = scale.clamp(*demand.scale_range)
    if demand.scales:
        allowed = torch.tensor(sorted(demand.scales), dtype=scale.dtype, device=scale.device)
        place = torch.searchsorted(allowed, (scale * _SLACK).contiguous())
        above = place == len(allowed)
        nearest = allowed[place.clamp(max=len(allowed) - 1)]
        scale = torch.where(above, scale, nearest)
    if demand.power_of_two_scale:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return scale
