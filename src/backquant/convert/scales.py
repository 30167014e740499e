"""The measured scales of each match, for the constraints that can be checked only after calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from backquant.convert.fold import Constants
from backquant.convert.hardware_biases import biases_of
from backquant.convert.state import Conversion
from backquant.convert.weights import weight_scales, without_training
from backquant.dtypes import ObservedQParams
from backquant.graph import get_module
from backquant.match.plan import Match
from backquant.match.recheck import MeasuredScales
from backquant.prepare import Role


def measured_scales(work: Conversion) -> list[MeasuredScales]:
    """The scales at every match that the plan has a question about (``Plan.predicates``)."""
    constrained = {predicate.node for predicate in work.plan.predicates}
    asked = {(predicate.node, predicate.role) for predicate in work.plan.predicates}
    of_weight = {node for node, role in asked if role in ("weight", "ratio", "bias step")}
    matches = [match for match in work.plan.matches if match.anchor in constrained]
    found: dict[tuple[str, str], list[float]] = {}
    anchors_by_root: dict[str, list[str]] = {}
    for match in matches:
        for reader in match.readers:
            anchors_by_root.setdefault(reader, []).append(match.anchor)
        found[match.anchor, "weight"] = _module_weight(work, match, of_weight)
    ranges: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for site in work.prepared.sites.sites:
        scales = _scales(work.qparams[site.group])
        spans = _spans(work, site.group)
        if site.producer in constrained:
            found.setdefault((site.producer, "output"), []).extend(scales)
            ranges.setdefault((site.producer, "output"), []).extend(spans)
        role = "weight" if site.role is Role.WEIGHT else "input"
        for reader in site.readers if site.role is not Role.BIAS else ():
            for anchor in anchors_by_root.get(reader, ()):
                found.setdefault((anchor, role), []).extend(scales)
                ranges.setdefault((anchor, role), []).extend(spans)
    for anchor in work.ratio_units:
        unit = work.ratio_units[anchor].own
        found[anchor, "ratio"] = [scale / unit for scale in found.get((anchor, "weight"), [])]
    for match in matches:
        if (match.anchor, "bias step") in asked:
            found[match.anchor, "bias step"] = bias_steps(work, match, found)
    return [
        MeasuredScales(*place, tuple(scales), tuple(ranges.get(place, ())))
        for place, scales in found.items()
        if scales
    ]


def _module_weight(work: Conversion, match: Match, constrained: set[str]) -> list[float]:
    return weight_scales(work, match) if match.anchor in constrained else []


def _spans(work: Conversion, group: str) -> list[tuple[float, float]]:
    """The measured range, counted in steps of the scale that was calculated from it."""
    was, scale = work.measured[group], work.qparams[group].scale
    if was.scale is None or was.zero_point is None or scale is None:
        return []
    steps = (was.scale / scale).flatten()
    zero_points = was.zero_point.flatten()
    lows, highs = ((end - zero_points) * steps for end in (was.quant_min, was.quant_max))
    return list(zip(lows.tolist(), highs.tolist(), strict=True))


def _scales(found: ObservedQParams) -> list[float]:
    return [] if found.scale is None else [float(s) for s in found.scale.flatten()]


# The step of integer biases, counted in steps of the output: input scale × weight scale / output scale.


def bias_steps(
    work: Conversion, match: Match, scales: Mapping[tuple[str, str], Sequence[float]]
) -> list[float]:
    """Input scale × weight scale / output scale, for each channel whose bias is not 0.

    Empty without a bias, where a scale is not known, and where an activation has several scales. If the
    bias is computed in the graph, all channels count.
    """
    inputs, outputs = (set(scales.get((match.anchor, role), ())) for role in ("input", "output"))
    weights = list(scales.get((match.anchor, "weight"), ()))
    if len(inputs) != 1 or len(outputs) != 1 or not weights:
        return []
    given, output = inputs.pop(), outputs.pop()
    steps = torch.tensor(weights, dtype=torch.float64) * given / output
    root = work.nodes[match.root]
    if root.op == "call_module":
        bias = _of_module(get_module(work.module, str(root.target)))
        return [] if bias is None else _beside(bias, steps)
    found: list[float] = []
    for node in biases_of(work, root):
        bias = Constants(work.module).tensor(node) if node.op == "get_attr" else None
        found += steps.tolist() if bias is None else _beside(bias, steps)
    return found


def _of_module(trained: nn.Module) -> torch.Tensor | None:
    plain = without_training(trained)
    part = plain[0] if isinstance(plain, nn.Sequential) and len(plain) else plain
    bias = getattr(part, "bias", None)
    return bias if isinstance(bias, torch.Tensor) else None


def _beside(bias: torch.Tensor, steps: torch.Tensor) -> list[float]:
    """The steps of channels whose bias is not 0. In a transposed convolution each group has the same
    steps."""
    if steps.numel() == 1 or bias.numel() % steps.numel():
        return steps.tolist() if bool((bias.detach() != 0).any()) else []
    each = steps.repeat(bias.numel() // steps.numel())
    found: list[float] = each[bias.detach().flatten().cpu() != 0].tolist()
    return found
