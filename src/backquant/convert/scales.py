"""Measured scales by match, for the constraints that only they can answer."""

from __future__ import annotations

from backquant.convert.state import Conversion
from backquant.convert.weights import weight_scales
from backquant.dtypes import ObservedQParams
from backquant.match.plan import Match
from backquant.match.recheck import MeasuredScales
from backquant.prepare import Role

__all__ = ["measured_scales"]


def measured_scales(work: Conversion) -> list[MeasuredScales]:
    """The scales at every match that the plan has a question about (``Plan.predicates``)."""
    asked = {predicate.node for predicate in work.plan.predicates}
    of_weight = {p.node for p in work.plan.predicates if p.role == "weight"}
    matches = [match for match in work.plan.matches if match.anchor in asked]
    found: dict[tuple[str, str], list[float]] = {}
    anchors_by_root: dict[str, list[str]] = {}
    for match in matches:
        for reader in match.readers:
            anchors_by_root.setdefault(reader, []).append(match.anchor)
        found[match.anchor, "weight"] = _module_weight(work, match, of_weight)
    for site in work.prepared.sites.sites:
        scales = _scales(work.qparams[site.group])
        if site.producer in asked:
            found.setdefault((site.producer, "output"), []).extend(scales)
        role = "weight" if site.role is Role.WEIGHT else "input"
        for reader in site.readers if site.role is not Role.BIAS else ():
            for anchor in anchors_by_root.get(reader, ()):
                found.setdefault((anchor, role), []).extend(scales)
    return [MeasuredScales(node, role, tuple(s)) for (node, role), s in found.items() if s]


def _module_weight(work: Conversion, match: Match, asked: set[str]) -> list[float]:
    return weight_scales(work, match) if match.anchor in asked else []


def _scales(found: ObservedQParams) -> list[float]:
    return [] if found.scale is None else [float(s) for s in found.scale.flatten()]
