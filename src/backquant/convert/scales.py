"""The measured scales of each match, for the constraints that can be checked only after calibration."""

from __future__ import annotations

from backquant.convert.bias_steps import bias_steps
from backquant.convert.state import Conversion
from backquant.convert.weights import weight_scales
from backquant.dtypes import ObservedQParams
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
