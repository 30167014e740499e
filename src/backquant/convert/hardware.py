"""What a description says of the hardware: ratios of scales, scales of biases, how results are rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from backquant.backend_config import BackendConfig, DTypeConfig, DTypeWithConstraints
from backquant.backend_config.dtypes import Ratio
from backquant.convert.contracts import groups_are_measured
from backquant.convert.fold import Constants
from backquant.convert.state import Conversion
from backquant.dtypes import ObservedQParams, integer_range, is_symmetric, stored_scale
from backquant.errors import ConfigError
from backquant.graph import contract, get_module, set_module, shallow_copy
from backquant.graph.edit import weighted_part
from backquant.match.plan import Match
from backquant.match.refusal import chosen_dtype_config
from backquant.operators import find
from backquant.prepare import Role
from backquant.prepare.sites import input_positions

# Changes measured qparams into ones that the hardware has, by the constraints of the description.
#
# 1. A zero point that is demanded alone: the smallest scale whose range holds what was measured around it.
# 2. ``scale_range``: moved to its nearest end; values beyond the largest saturate.
# 3. ``scales``: the smallest of the set that is not below; where all are, it stays, and the plan refuses
#    it.
# 4. ``power_of_two_scale``: the next power of two above.
# 5. ``scale_dtype``: as it is stored (``backquant.dtypes.granularity``); of groups that are quantized at
#    each call the dtype is handed on.
# 6. ``requantization_ratio``: weights get the scale next above that makes input × weight / output what is
#    demanded; ``hardware_ratios`` has raised the output's before.
# 7. Before all of these, a weight gets no smaller scale than one by which the bias fits the integers that it
#    is added in (``weight_floors``): a channel of next to no weight beside a bias would saturate, or wrap.
#
# An affine zero point moves with the scale, so that the lower end of the range stays; one of a symmetric
# scheme does not. What several operators demand of a value that they share is met one after the other.


#: A function from the measured qparams of a weight to qparams that the hardware has.
WeightMaker = Callable[[dict[str, Any]], dict[str, Any]]
_Pair = tuple[torch.Tensor, torch.Tensor]
# Scales are float32: a hardware scale that float32 has rounded still counts as that scale.
_SLACK = 1 - 2**-20


class Asked(NamedTuple):
    """What a description says of the hardware: that scales, or their ratios, are of a kind, how biases are
    stored, and how results are rounded."""

    scales: bool
    ratios: bool
    biases: bool
    rounding: bool


def described_hardware(backend: BackendConfig) -> Asked:
    """What one dtype config of ``backend`` at least says.

    >>> described_hardware(BackendConfig("b"))
    Asked(scales=False, ratios=False, biases=False, rounding=False)
    """
    return backend.derived(described_hardware, _asked)


def _asked(backend: BackendConfig) -> Asked:
    configs = [config for entry in backend.shared_configs for config in entry.dtype_configs]
    tensors = (
        getattr(config, f"{role}_dtype_with_constraints")
        for config in configs
        for role in ("input", "weight", "output")
    )
    return Asked(
        any(demand.produces_scales for demand in tensors),
        any(config.requantization_ratio is not None for config in configs),
        any(config.bias_scale is not None for config in configs),
        any(config.rounding or config.requantization for config in configs),
    )


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
    floor = work.weight_floors.get(str(work.nodes[match.root].target))
    made: WeightMaker | None = None
    if floor is not None:
        made = partial(_with_room, floor=floor)
    if config is None or demand is None or not (demand.produces_scales or unit is not None):
        return made
    made = partial(_then, first=made, second=partial(produced_dict, demand=demand))
    if unit is None or config.requantization_ratio is None:
        return made
    return partial(_in_ratio, made=made, ratio=config.requantization_ratio, unit=unit.of_weight)


def _then(
    qparams: dict[str, Any], first: WeightMaker | None, second: WeightMaker
) -> dict[str, Any]:
    return second(qparams if first is None else first(qparams))


def _with_room(qparams: dict[str, Any], floor: torch.Tensor) -> dict[str, Any]:
    if "scale" not in qparams:  # several weights, by their names
        return qparams
    return {**qparams, "scale": at_least(torch.as_tensor(qparams["scale"]), floor)}


def at_least(scale: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """Rule 7: the scales of a weight, of a tensor or of each channel, where none is below ``floor``, which
    has one for each channel that comes out. Scales of groups and blocks are as they were.

    >>> at_least(torch.tensor([1e-7, 0.5]), torch.tensor([1e-5, 1e-5]))
    tensor([1.0000e-05, 5.0000e-01])
    """
    if floor.numel() % scale.numel():
        return scale
    least = floor.reshape(-1, scale.numel()).amax(0)  # a transposed convolution's: of each group
    return torch.maximum(scale, least.to(scale).reshape(scale.shape))


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


# Biases as the hardware adds them: rounded to integers at the scale of the description, and dequantized.
#
# 1. ``bias_scale: input_times_weight``: one scale for each that the weight has; ``output``: that of the
#    output.
# 2. The rounded bias is what the reference model adds. A module that is called with several such scales
#    gets a copy for each, which shares its weight.
# 3. 64-bit biases have the 40 bits that accelerators accumulate in (Arm's Ethos-U, TensorFlow Lite's 16x8).


_BITS_40 = (-(1 << 39), (1 << 39) - 1)


class Groups:
    """The groups of observers around each operator: of its inputs, of its weight, and of its output."""

    def __init__(self, work: Conversion) -> None:
        self.qparams = work.qparams
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

    def scale(self, groups: Iterable[str]) -> float | None:
        """The one scale of tensors that have a single one; ``None`` where there are several, or none."""
        scales = (self.qparams[group].scale for group in groups)
        found = {float(scale) for scale in scales if scale is not None and scale.numel() == 1}
        return found.pop() if len(found) == 1 else None


def accumulator_steps(work: Conversion, match: Match, around: Groups) -> torch.Tensor | None:
    """What one step of the sums of a weighted operator stands for: input × weight, float64; one, or one for
    each channel that comes out."""
    root, groups, weight = work.nodes[match.root], 1, None
    if root.op == "call_module":
        module: Any = _part(work, root)
        weight = getattr(module, "weight_scale", None)
        groups = int(module.groups) if getattr(module, "transposed", False) else 1
    elif match.root in around.weights:
        weight = work.qparams[around.weights[match.root]].scale
        if "conv_transpose" in str(root.target):
            groups = int(root.args[6] if len(root.args) > 6 else root.kwargs.get("groups", 1))  # type: ignore[arg-type]
    given = around.scale(around.inputs.get(match.root, ()))
    if weight is None or given is None:
        return None
    steps: torch.Tensor = given * weight.detach().double()
    shared = groups > 1 and steps.numel() > 1  # transposed: each group has the scales of the first
    return steps.repeat(groups) if shared else steps


def round_biases(work: Conversion) -> None:
    """Give modules and functions the biases that the hardware adds."""
    around = Groups(work)
    of_modules: dict[str, list[tuple[fx.Node, torch.Tensor, torch.dtype]]] = {}
    for match in work.plan.matches:
        config = chosen_config(work, match)
        if config is None or config.bias_scale is None or config.bias_dtype is None:
            continue
        if config.bias_scale == "output":
            group = around.outputs.get(match.anchor)
            own = None if group is None else around.scale((group,))
            steps = None if own is None else torch.tensor(own, dtype=torch.float64)
        else:
            steps = accumulator_steps(work, match, around)
        root = work.nodes[match.root]
        if steps is None:
            continue
        if root.op == "call_module":
            called = of_modules.setdefault(str(root.target), [])
            called.append((root, steps, config.bias_dtype))
        else:
            _round_argument(work, root, steps, config.bias_dtype)
    for path, calls in of_modules.items():
        _round_calls(work, path, calls)


def _round_calls(
    work: Conversion, path: str, calls: list[tuple[fx.Node, torch.Tensor, torch.dtype]]
) -> None:
    """Rule 2: the first scale rounds the bias of the module itself, each other one that of a copy."""
    made: list[tuple[torch.Tensor, str]] = []
    module = get_module(work.module, path)
    if getattr(_part(work, path), "bias", None) is None:
        return
    for node, steps, _ in calls:
        known = next((name for other, name in made if torch.equal(other, steps)), "")
        if not known:
            known = work.editor.names.take(f"{path}_bias_") if made else path
            if made:
                set_module(work.module, known, shallow_copy(module))
            made.append((steps, known))
        node.target = known
    for steps, name in reversed(made):  # the module itself last: its copies begin with its bias
        _round_parameter(_part(work, name), steps, calls[0][2])


def _part(work: Conversion, where: fx.Node | str) -> nn.Module:
    module = get_module(work.module, where if isinstance(where, str) else str(where.target))
    return weighted_part(module)


def _round_parameter(module: nn.Module, steps: torch.Tensor, dtype: torch.dtype) -> None:
    bias = getattr(module, "bias", None)
    if bias is None:
        return
    made = nn.Parameter(
        _rounded(bias, steps.to(bias.device), dtype), requires_grad=bias.requires_grad
    )
    module._parameters = {**module._parameters, "bias": made}


def _round_argument(
    work: Conversion, root: fx.Node, steps: torch.Tensor, dtype: torch.dtype
) -> None:
    """A constant bias of a function is replaced by a rounded one, which is a buffer."""
    for node in biases_of(work, root):
        if node.op != "get_attr":
            continue
        bias = Constants(work.module).tensor(node)
        if bias is None:
            continue
        prefix = f"{str(node.target).replace('.', '_')}_rounded_"
        tensor = _rounded(bias, steps.to(bias.device), dtype)
        root.replace_input_with(
            node, work.editor.read_buffer(root, work.editor.names.take(prefix), tensor)
        )


def biases_of(work: Conversion, root: fx.Node) -> Iterator[fx.Node]:
    """The node that a function's bias comes from, if it has one."""
    positions = input_positions(work.prepared.backend_config).get(root.target, {})
    place = positions.get("bias", len(root.args))
    bias = root.args[place] if place < len(root.args) else root.kwargs.get("bias")
    if isinstance(bias, fx.Node):
        yield bias


def _rounded(bias: torch.Tensor, steps: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limits = _BITS_40 if dtype == torch.int64 else integer_range(dtype)
    assert limits is not None
    integers = torch.round(bias.detach().double() / steps).clamp(*map(float, limits))
    return (integers * steps).to(bias.dtype)


# Quantize outputs with the arithmetic of the hardware: ``rounding`` and ``requantization`` of a dtype
# config.
#
# Behind a convolution, linear layer or matrix product, the quantize node is replaced by one that computes
# the integer sums and requantizes them with the named arithmetic. Behind other operators, and where the
# input has no single known scale, it is replaced by one that only rounds as named. The dequantize node
# stays.


_DEFAULT = "half_even"


def round_results(work: Conversion) -> None:
    """Replace the quantize nodes of the results whose rounding is described.

    Raises ConfigError in the dialect of quantized tensors, whose operators round halves to even.
    """
    found = [(match, chosen_config(work, match)) for match in work.plan.matches]
    described = [(m, c) for m, c in found if c is not None and (c.rounding or c.requantization)]
    if not described:
        return
    if work.dialect != "decomposed":
        raise ConfigError(
            "rounding and requantization have no operators on quantized tensors",
            where=f"{work.prepared.backend_config.name}, convert_to_reference_fx(dialect={work.dialect!r})",
            fix='dialect="decomposed", which backquant.quantize uses',
        )
    sites = {site.producer: site.name for site in work.prepared.sites.sites if site.producer}
    around = Groups(work)
    for match, config in described:
        dequantize = work.dequantized.get(sites.get(match.anchor, ""))
        if dequantize is None:
            continue
        quantize = dequantize.args[0]
        arithmetic = config.requantization or "float"
        steps = None if arithmetic == "float" else accumulator_steps(work, match, around)
        if isinstance(quantize, fx.Node):
            _replace(work, quantize, match, config, steps)


def _replace(
    work: Conversion,
    quantize: fx.Node,
    match: Match,
    config: DTypeConfig,
    steps: torch.Tensor | None,
) -> None:
    ops, rounding = torch.ops.backquant, config.rounding or _DEFAULT
    value, *qparams = quantize.args
    if steps is None:
        quantize.target = ops.quantize_rounded.default
        quantize.args = (value, *qparams, rounding)
        return
    root = work.nodes[match.root]
    name = work.editor.names.take(f"{match.root}_accumulator_step_")
    unit = work.editor.read_buffer(quantize, name, steps)
    quantize.target = ops.requantize.default
    axis = _channel_axis(work, root)
    quantize.args = (value, unit, axis, *qparams, config.requantization, rounding)


def _channel_axis(work: Conversion, root: fx.Node) -> int:
    """The axis of output channels, from the end: the last behind a matrix, else before those of space."""
    if root.op == "call_module":
        weight: Any = _part(work, root).weight
        dims = weight.dim()
    else:
        operator = find(root.target)
        name = "" if operator is None else operator.name
        dims = int(name[-2]) + 2 if name.startswith("conv") and name.endswith("d") else 2
    return -1 if dims == 2 else 1 - int(dims)
