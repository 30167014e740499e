"""Changes scales until input × weight / output scale is within the description's ``requantization_ratio``.

1. Where the ratio is too large, the output's scale is raised, operator by operator in the order of the graph,
   so that the operators behind it see the raised scale.
2. Where it is too small, or has to be a power of two, the weight's scale is raised: that of a module when
   it is converted (``hardware_scales.weight_maker``), that of a function here.

Where neither helps, because scales are shared or fixed, ``match.recheck`` leaves the operator in float.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from backquant.backend_config.dtypes import Ratio
from backquant.convert.hardware_scales import chosen_config, ratio_scale
from backquant.convert.state import Conversion, RatioUnit
from backquant.convert.weights import weight_scales
from backquant.dtypes import ObservedQParams
from backquant.match.plan import Match
from backquant.prepare import Role


class _Groups:
    """The group of observers of each operator's input and of its output; None where there are several."""

    def __init__(self, work: Conversion) -> None:
        self.inputs: dict[str, set[str]] = {}
        self.weights: dict[str, str] = {}
        self.outputs: dict[str, str] = {}
        for site in work.prepared.sites.sites:
            if site.producer:
                self.outputs[site.producer] = site.group
            for reader in site.readers:
                if site.role is Role.WEIGHT:
                    self.weights[reader] = site.group
                elif site.role is not Role.BIAS:
                    self.inputs.setdefault(reader, set()).add(site.group)


def ratio_units(work: Conversion) -> dict[str, RatioUnit]:
    """The units of the operators whose ratio is described; ``work.qparams`` is changed to suit."""
    groups, found = _Groups(work), dict(work.qparams)
    units: dict[str, RatioUnit] = {}
    of_weights: dict[str, float] = {}
    for match in work.plan.matches:
        config = chosen_config(work, match)
        ratio = None if config is None else config.requantization_ratio
        inputs = groups.inputs.get(match.root, set())
        if ratio is None or len(inputs) != 1 or match.anchor not in groups.outputs:
            continue
        given, output = found[next(iter(inputs))], groups.outputs[match.anchor]
        one, two = given.scale, found[output].scale
        if one is None or two is None or one.numel() != 1 or two.numel() != 1:
            continue
        weight = groups.weights.get(match.root)
        scales = _weights(work, match, found, weight)
        raised = _raised(float(one), max(scales, default=0.0), float(two), ratio)
        if raised > float(two) and not work.source.probe(work.prepared.sites[output].spec).fixed:
            two = torch.full_like(two, raised)
            found[output] = replace(found[output], scale=two)
        own = float(two) / float(one)
        module = weight or str(work.nodes[match.root].target)
        units[match.anchor] = RatioUnit(own, of_weights.setdefault(module, own))
        if weight is not None:
            made = found[weight].scale
            scale = None if made is None else ratio_scale(made, ratio, own)
            found[weight] = replace(found[weight], scale=scale)
    work.qparams = found
    return units


def _weights(
    work: Conversion, match: Match, found: Mapping[str, ObservedQParams], group: str | None
) -> list[float]:
    if group is None:
        return weight_scales(work, match)
    scale = found[group].scale
    return [] if scale is None else [float(s) for s in scale.flatten()]


def _raised(given: float, weight: float, output: float, ratio: Ratio) -> float:
    """The output's scale by which the largest ratio is not above its bound."""
    high = None if ratio == "power_of_two" else ratio[1]
    return output if high is None else max(output, given * weight / high)
