"""The measured scales of each match, for the constraints that can be checked only after calibration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import fx

from backquant.convert.contracts import activations_are_quantized, needed_are_measured
from backquant.convert.dialects import DIALECTS, Writer
from backquant.convert.fold import Constants
from backquant.convert.hardware import Groups, at_least, biases_of, chosen_config, ratio_scale
from backquant.convert.state import Conversion, RatioUnit
from backquant.convert.weights import weight_scales, without_training
from backquant.dtypes import ObservedQParams
from backquant.graph import contract, get_module
from backquant.graph.edit import weighted_part
from backquant.match.plan import Match
from backquant.match.scale_rules import MeasuredScales, bias_limit
from backquant.observe import is_fixed_qparams
from backquant.prepare import Role, Site
from backquant.prepare.record import QParamsKey

_WIDE = float(1 << 29)


def measured_scales(work: Conversion) -> list[MeasuredScales]:
    """The scales at every match that the plan has a question about (``Plan.predicates``)."""
    constrained = {predicate.node for predicate in work.plan.predicates}
    asked = {(predicate.node, predicate.role) for predicate in work.plan.predicates}
    of_weight = {node for node, role in asked if role in ("weight", "ratio", "bias step", "bias")}
    matches = [match for match in work.plan.matches if match.anchor in constrained]
    found: dict[tuple[str, str], list[float]] = {}
    anchors_by_root: dict[str, list[str]] = {}
    for match in matches:
        for reader in match.readers:
            anchors_by_root.setdefault(reader, []).append(match.anchor)
        if match.anchor in of_weight:
            found[match.anchor, "weight"] = weight_scales(work, match)
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
        if (match.anchor, "bias") in asked:
            found[match.anchor, "bias"] = _bias_integers(work, match, found)
    return [
        MeasuredScales(*place, tuple(scales), tuple(ranges.get(place, ())))
        for place, scales in found.items()
        if scales
    ]


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
    return [] if found.scale is None else found.scale.flatten().tolist()


# Integer biases: their step, counted in steps of the output, and how many of their own steps they have.


def bias_steps(
    work: Conversion, match: Match, scales: Mapping[tuple[str, str], Sequence[float]]
) -> list[float]:
    """Input scale × weight scale / output scale, for each channel whose bias is not 0.

    Empty without a bias, where a scale is not known, and where an activation has several scales. If the
    bias is computed in the graph, all channels count.
    """
    steps, output = _products(match, scales), _only(scales.get((match.anchor, "output"), ()))
    root = work.nodes[match.root]
    if steps is None or output is None or not _has_bias(work, root):
        return []
    bias, steps = _bias(work, root), steps / output
    if bias is not None and (steps.numel() == 1 or bias.numel() % steps.numel()):
        return steps.tolist() if bool((bias != 0).any()) else []
    if bias is not None:  # a transposed convolution has the same steps in each group
        steps = steps.repeat(bias.numel() // steps.numel())[bias.flatten() != 0]
    found: list[float] = steps.tolist()
    return found


def _bias_integers(
    work: Conversion, match: Match, scales: Mapping[tuple[str, str], Sequence[float]]
) -> list[float]:
    """The absolute bias of each channel in steps of its scale, where both are known."""
    config, bias = chosen_config(work, match), _bias(work, work.nodes[match.root])
    if config is None or bias is None:
        return []
    if config.bias_scale == "output":
        output = _only(scales.get((match.anchor, "output"), ()))
        steps = None if output is None else torch.tensor([output], dtype=torch.float64)
    else:
        steps = _products(match, scales)
    if steps is None or bias.numel() % steps.numel():
        return []
    found: list[float] = (bias.abs() / steps.repeat(bias.numel() // steps.numel())).tolist()
    return found


def _products(
    match: Match, scales: Mapping[tuple[str, str], Sequence[float]]
) -> torch.Tensor | None:
    """Input × weight scale, of the tensor or of each channel."""
    one, weights = (scales.get((match.anchor, role), ()) for role in ("input", "weight"))
    given = _only(one)
    if given is None or not weights:
        return None
    return torch.tensor(list(weights), dtype=torch.float64) * given


def _only(scales: Iterable[float]) -> float | None:
    known = set(scales)
    return known.pop() if len(known) == 1 else None


def _has_bias(work: Conversion, root: fx.Node) -> bool:
    return _bias(work, root) is not None or any(True for _ in biases_of(work, root))


def _bias(work: Conversion, root: fx.Node) -> torch.Tensor | None:
    """What an operator adds when it no longer trains (float64, flat); ``None`` where it is computed."""
    if root.op == "call_module":
        path = str(root.target)
        bias = work.request.biases.get(path)
        if bias is None:
            trained = get_module(work.module, path)
            bias = getattr(weighted_part(without_training(trained)), "bias", None)
    else:
        read = (node for node in biases_of(work, root) if node.op == "get_attr")
        bias = next((Constants(work.module).tensor(node) for node in read), None)
    return bias.detach().cpu().double().flatten() if isinstance(bias, torch.Tensor) else None


# The least scales of weights by which biases fit: rule 7 of ``hardware``.


def weight_floors(work: Conversion) -> dict[str, torch.Tensor]:
    """The least scales of the weight of each module with a bias, by its path (float64, one for each channel
    that comes out), so that the bias fits; ``work.qparams`` is changed to suit for weights of functions.

    Runtimes add biases as integers of input × weight scale, whatever a description says of them. Where these
    have 32 bits, only channels of next to no weight need larger scales, and their products are far below a
    step of the result. For narrower biases weights would be lost: the plan refuses those that do not fit
    (``bias-range``).
    """
    around, found = Groups(work), dict(work.qparams)
    of_modules: dict[str, torch.Tensor] = {}  # all calls of one share its weight
    for match in work.plan.matches:
        config, given = chosen_config(work, match), around.scale(around.inputs.get(match.root, ()))
        if config is None or given is None or config.bias_scale == "output":
            continue
        root, limit = work.nodes[match.root], bias_limit(config.bias_dtype)
        bias = _bias(work, root) if limit >= _WIDE else None
        if bias is None:
            continue
        floor = bias.abs() / (limit * given)
        if root.op == "call_module":
            path = str(root.target)
            of_modules[path] = torch.maximum(of_modules.get(path, floor), floor)
        elif (group := around.weights.get(match.root)) is not None:
            scale = found[group].scale
            raised = None if scale is None else at_least(scale, floor)
            found[group] = replace(found[group], scale=raised)
    work.qparams = found
    return of_modules


# Changes scales until input × weight / output scale is within the description's ``requantization_ratio``.
#
# 1. Where the ratio is too large, the output's scale is raised, operator by operator in the order of the
#    graph, so that the operators behind it see the raised scale.
# 2. Where it is too small, or has to be a power of two, the weight's scale is raised: that of a module when
#    it is converted (``hardware_scales.weight_maker``), that of a function here.
#
# Where neither helps, because scales are shared or fixed, ``match.recheck`` leaves the operator in float.


def ratio_units(work: Conversion) -> dict[str, RatioUnit]:
    """The units of the operators whose ratio is described; ``work.qparams`` is changed to suit."""
    groups, found = Groups(work), dict(work.qparams)
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
        scales = weight_scales(work, match) if weight is None else _scales(found[weight])
        raised = float(two)
        if ratio != "power_of_two" and ratio[1] is not None:
            raised = max(raised, float(one) * max(scales, default=0.0) / ratio[1])
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


# Observers become quantize/dequantize nodes; those with no quantized operator around them are removed.
#
# ``float_results`` says which are needed. One quantize and one dequantize node serve all users of a site.


@contract(requires=[needed_are_measured], ensures=[activations_are_quantized])
def convert_activations(work: Conversion, needed: frozenset[str], skipped: set[str]) -> None:
    """Replace the call of every observer, in graph order.

    ``needed``: the sites that are quantized, by name; those of ``skipped`` are already gone.
    """
    sites = {site.name: site for site in work.prepared.sites.sites if site.name not in skipped}
    for node in list(work.module.graph.nodes):
        site = sites.get(node.name)
        if site is None:
            continue
        value = node.all_input_nodes[0]
        if site.name in needed:
            _write(work, site, node, value)
        else:
            node.replace_all_uses_with(value)
        work.editor.erase(node)


def qparams_keys(work: Conversion, needed: frozenset[str]) -> dict[str, QParamsKey]:
    """Where PyTorch's reference model has the qparams of each site of ``needed`` that was measured."""
    sites = {site.name: site for site in work.prepared.sites.sites if site.name in needed}
    numbers: Counter[str] = Counter()
    found: dict[str, QParamsKey] = {}
    for node in work.module.graph.nodes:
        site = sites.get(node.name)
        if site is not None and work.qparams[site.group].scale is not None:
            stem = _buffer_prefix(work, site, node).replace(".", "_")
            fixed = is_fixed_qparams(get_module(work.module, site.name))
            found[site.name] = QParamsKey(stem, numbers[stem], site.name, site.group, fixed)
            numbers[stem] += 1
    return found


def _write(work: Conversion, site: Site, node: fx.Node, value: fx.Node) -> None:
    engine = work.prepared.backend_config
    writer = Writer(
        work.editor,
        position=node,
        buffer_prefix=_buffer_prefix(work, site, node),
        engine=engine.engine or engine.name,
    )
    before = node.prev
    dequantized = DIALECTS[work.dialect](writer, value, work.qparams[site.group])
    work.dequantized[site.name] = dequantized
    if site.name in work.keys_of_sites:
        work.keys[dequantized.all_input_nodes[0].name] = work.keys_of_sites[site.name]
    made = before.next
    while made is not node:
        if made.op != "get_attr":
            work.editor.provenance.record(made.name, (site.name,))
        made = made.next
    node.replace_all_uses_with(dequantized)


def _buffer_prefix(work: Conversion, site: Site, node: fx.Node) -> str:
    """PyTorch's names: ``<module path>[_input]``, so that a buffer tells what it belongs to.

    The path is that of the observed node, or, where only the reader asked for the observer, that of
    the first reader (the first functional linear, if there is one), marked ``_input``.
    """
    observed = site.value
    if not _requested_by_reader(work, observed):
        scope = work.prepared.scopes.get(observed)
        return scope.path if scope is not None else ""
    users = list(node.users)
    linear = next((u for u in users if u.op == "call_function" and u.target is F.linear), None)
    owner = linear if linear is not None else next(iter(users), None)
    scope = work.prepared.scopes.get(owner.name) if owner is not None else None
    return (scope.path if scope is not None else "") + "_input"


def _requested_by_reader(work: Conversion, observed: str) -> bool:
    node = work.nodes.get(observed)
    if node is not None and node.op == "placeholder":
        return True
    decision = work.plan.decisions.get(observed)
    return decision is not None and work.source.qconfig(decision.rule) is None
