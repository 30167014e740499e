"""Rules about the dtype configs of one entry.

1. ``dynamic-output``: under dynamic quantization the output is computed in float.
   ``dynamic-scale``: its input's scale is chosen at each call; nothing can be demanded of it but, of groups
   and blocks, what it is stored in.
   ``granularity-of``: tokens are those of such an input; groups and blocks those, too, or of a weight.
2. ``bias-scale``: a bias with a scale is an integer, and one that is an integer has a scale; what it takes
   its scale from is quantized.
   ``requantization``: rounding needs a quantized output; arithmetic on sums a quantized input, too, and
   weight where there is one; a shift only needs scales, or a ratio of them, that are powers of two.
   ``table-entries``: of functions of one static integer value; one more than a power of two, which is at most
   the number of integers, or that number.
   ``requantization-ratio``: it is one of a static integer input, weight and output, and no empty range.
3. ``contradiction``: a condition that nothing satisfies, alone or with that of the entry.
4. ``dtype-config-shadowed``: an earlier one admits all that this one admits, so it is never chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from backquant.backend_config.conditions import AllOf, Condition, conjuncts, contradictions
from backquant.backend_config.dtypes import DTypeConfig, DTypeWithConstraints
from backquant.dtypes import Granularity, find_dtype, integer_range, is_scaled_float

# What validation says: findings as values, and the place that each is about.


#: ``error``: the description contradicts itself. ``warning``: something written has no effect.
#: ``note``: legal, and worth a look.
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that validation found. ``entry`` is the index into ``BackendConfig.configs``, ``field`` the
    path in that entry.

    >>> print(Finding("error", "bounds-order", "entry 3 (torch.add)", "min > max", "swap them"))
    error: entry 3 (torch.add): min > max [bounds-order]
      fix  swap them
    """

    severity: Severity
    rule: str
    place: str
    message: str
    fix: str = ""
    entry: int | None = None
    field: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON-able data.

        >>> Finding("note", "rule", "place", "message").to_dict()["severity"]
        'note'
        """
        return asdict(self)

    def __str__(self) -> str:
        head = f"{self.place}: " if self.place else ""
        tail = f"\n  fix  {self.fix}" if self.fix else ""
        return f"{self.severity}: {head}{self.message} [{self.rule}]{tail}"


@dataclass(frozen=True)
class Place:
    """Where a rule looks: an entry of a backend, and a field in it.

    >>> place = Place(3, "torch.add").at("dtype_configs[0]").at("input_dtype")
    >>> str(place)
    'entry 3 (torch.add): dtype_configs[0].input_dtype'
    """

    entry: int
    pattern: str
    field: str = ""

    def at(self, part: str) -> Place:
        """The place of a part of this one."""
        return replace(self, field=f"{self.field}.{part}" if self.field else part)

    def find(self, severity: Severity, rule: str, message: str, fix: str = "") -> Finding:
        """A finding here."""
        return Finding(severity, rule, str(self), message, fix, self.entry, self.field)

    def error(self, rule: str, message: str, fix: str = "") -> Finding:
        """The finding that the description contradicts itself here."""
        return self.find("error", rule, message, fix)

    def warning(self, rule: str, message: str, fix: str = "") -> Finding:
        """The finding that what is written here has no effect."""
        return self.find("warning", rule, message, fix)

    def __str__(self) -> str:
        head = f"entry {self.entry} ({self.pattern})"
        return f"{head}: {self.field}" if self.field else head


# Rules about one dtype with its constraints.
#
# 1. ``bounds-order``: a lower bound above its upper bound admits nothing; integers have two values or more.
# 2. ``bounds-half-set``: one bound without the other is legal.
# 3. ``bounds-unreachable``: bounds outside of what the dtype can hold.
# 4. ``fixed-qparams``: a fixed scale has a zero point, both inside of the bounds and the range.
# 5. ``extended-constraints``: symmetric, granularity and power-of-two that contradict the others.
#    ``scale-domain``: no scale is left by ``scales``, ``scale_range``, ``power_of_two_scale`` and the bounds.
# 6. ``constraints-without-dtype``: nothing to constrain.


def constraint_findings(given: DTypeWithConstraints, place: Place) -> Iterator[Finding]:
    """Everything that these rules say about ``given``.

    >>> import torch
    >>> wrong = DTypeWithConstraints(torch.quint8, quant_min_lower_bound=9, quant_max_upper_bound=3)
    >>> [finding.rule for finding in constraint_findings(wrong, Place(0, "torch.add"))]
    ['bounds-order']
    """
    if given == DTypeWithConstraints(given.dtype):
        return
    if given.dtype is None:
        message = "constraints without a dtype have no effect"
        yield place.warning("constraints-without-dtype", message, "set dtype")
        return
    for judge in (_order, _half_set, _reachable, _fixed, _extended, _domain, _stored, _middle):
        yield from judge(given, place)


_PAIRS = (
    ("quant_min_lower_bound", "quant_max_upper_bound"),
    ("scale_min_lower_bound", "scale_max_upper_bound"),
)


def _order(given: DTypeWithConstraints, place: Place) -> Iterator[Finding]:
    for lower, upper in _PAIRS:
        low, high = getattr(given, lower), getattr(given, upper)
        if low is not None and high is not None and low > high:
            message = f"{lower} {low} is above {upper} {high}: nothing is supported"
            yield place.error("bounds-order", message, "swap the two bounds")
        elif low is not None and low == high and lower.startswith("quant"):
            message = f"{lower} and {upper} are both {low}: one value is nothing to quantize to"
            yield place.error("bounds-order", message, "widen the bounds")


def _half_set(given: DTypeWithConstraints, place: Place) -> Iterator[Finding]:
    unset = [name for name in _PAIRS[0] if getattr(given, name) is None]
    if len(unset) == 1:
        [lone] = set(_PAIRS[0]) - set(unset)
        message = f"{lone} is set without {unset[0]}; it is enforced alone (PyTorch ignores it)"
        yield place.find("note", "bounds-half-set", message, f"set {unset[0]} too")


def _reachable(given: DTypeWithConstraints, place: Place) -> Iterator[Finding]:
    rule, limits = "bounds-unreachable", integer_range(given.dtype) or _largest(given.dtype)
    for name in _PAIRS[0]:
        bound = getattr(given, name)
        if bound is None:
            continue
        if limits is None:
            yield place.warning(rule, f"{name} has no effect on {given.dtype}", f"remove {name}")
        elif not limits[0] <= bound <= limits[1]:
            yield _outside(name, bound, limits, place)
    low, high = given.scale_min_lower_bound, given.scale_max_upper_bound
    if high is not None and high <= 0:
        message = f"scale_max_upper_bound {high} admits no scale: scales are positive"
        yield place.error(rule, message, "remove it, or set a positive one")
    if low is not None and low <= 0:
        message = f"scale_min_lower_bound {low} has no effect: scales are positive"
        yield place.warning(rule, message, "remove scale_min_lower_bound")


def _largest(dtype: torch.dtype | None) -> tuple[float, float] | None:
    """The ends of a narrow float that has a scale: hardware may saturate before them."""
    row = find_dtype(dtype) if is_scaled_float(dtype) else None
    return None if row is None else (row.low, row.high)


def _outside(name: str, bound: float, limits: tuple[float, float], place: Place) -> Finding:
    """A bound that the dtype cannot hold: beyond its near end it is idle, beyond the far end deadly."""
    rule, holds = "bounds-unreachable", f"the dtype holds {limits[0]} to {limits[1]}"
    idle = bound < limits[0] if name == "quant_min_lower_bound" else bound > limits[1]
    if idle:
        return place.warning(rule, f"{name} {bound} has no effect: {holds}", f"remove {name}")
    fix = "choose a bound that the dtype holds"
    return place.error(rule, f"{name} {bound} admits nothing: {holds}", fix)


def _or(bound: float | None, default: float) -> float:
    return default if bound is None else bound


def _fixed(given: DTypeWithConstraints, place: Place) -> Iterator[Finding]:
    rule, scale, zero_point = "fixed-qparams", given.scale_exact_match, given.zero_point_exact_match
    if scale is not None and zero_point is None:
        message = "scale_exact_match is set without zero_point_exact_match; fixed qparams are both"
        yield place.error(rule, message, "set zero_point_exact_match too")
    if scale is not None:
        yield from _fixed_scale(given, scale, place)
    limits = integer_range(given.dtype)
    if zero_point is None or limits is None:
        return
    low = max(limits[0], _or(given.quant_min_lower_bound, limits[0]))
    high = min(limits[1], _or(given.quant_max_upper_bound, limits[1]))
    if not low <= zero_point <= high:
        message = f"zero_point_exact_match {zero_point} is outside of the range {low} to {high}"
        yield place.error(rule, message, f"choose one of {low} to {high}")


def _fixed_scale(given: DTypeWithConstraints, scale: float, place: Place) -> Iterator[Finding]:
    if not scale > 0:
        message = f"scale_exact_match {scale} is no scale: scales are positive"
        yield place.error("fixed-qparams", message)
        return
    low, high = _or(given.scale_min_lower_bound, 0.0), _or(given.scale_max_upper_bound, math.inf)
    if low <= high and not low <= scale <= high:
        message = f"scale_exact_match {scale} is outside of the scale bounds {low} to {high}"
        yield place.error("fixed-qparams", message, "widen the bounds, or remove them")
    if given.power_of_two_scale and not _is_power(scale):
        message = f"scale_exact_match {scale} is no power of two, as power_of_two_scale asks"
        yield place.error("extended-constraints", message, "remove one of the two")


def _extended(given: DTypeWithConstraints, place: Place) -> Iterator[Finding]:
    rule, axis = "extended-constraints", given.ch_axis
    shared = Granularity.parse(given.granularity or "per_tensor")
    if given.granularity == "per_tensor" and axis is not None:
        message = f"ch_axis {axis} contradicts granularity per_tensor"
        yield place.error(rule, message, "remove ch_axis")
    if axis is not None and shared.kind == "per_channel" and shared.axis not in (None, axis):
        message = f"ch_axis {axis} contradicts granularity {given.granularity}"
        yield place.error(rule, message, "remove one of the two")
    if shared.kind != "per_tensor" and given.scale_exact_match is not None:
        words = shared.words.replace("per ", "one per ", 1)
        message = f"fixed qparams are one scale for the whole tensor, not {words}"
        yield place.error(rule, message, "remove granularity")
    low, high = _or(given.scale_min_lower_bound, 0.0), _or(given.scale_max_upper_bound, math.inf)
    next_power = math.ldexp(1.0, math.ceil(math.log2(low))) if low > 0 else 0.0
    if given.power_of_two_scale and low <= high < next_power:
        message = "no power of two lies within the scale bounds, as power_of_two_scale asks"
        yield place.error(rule, message, "widen the bounds")


def _middle(given: DTypeWithConstraints, place: Place) -> Iterator[Finding]:
    zero_point, limits = given.zero_point_exact_match, integer_range(given.dtype)
    if not given.symmetric or zero_point is None or limits is None:
        return
    middles = {0} if limits[0] < 0 else {(limits[1] + 1) // 2, limits[1] // 2}
    if zero_point not in middles:
        message = f"zero_point_exact_match {zero_point} is not the middle that symmetric asks for"
        fix = f"zero_point_exact_match: {max(middles)}"
        yield place.error("extended-constraints", message, fix)


def _domain(given: DTypeWithConstraints, place: Place) -> Iterator[Finding]:
    """Sets and ranges of scales."""
    rule = "scale-domain"
    if given.scale_exact_match is not None and (given.scales is not None or given.scale_range):
        message = "scale_exact_match leaves nothing to scales and scale_range"
        yield place.error(rule, message, "remove them")
    low, high = given.scale_range or (None, None)
    ends = [end for end in (low, high) if end is not None]
    if any(not end > 0 for end in ends) or ends != sorted(ends):
        message = f"scale_range {[low, high]} is no range: scales are positive, the smaller first"
        yield place.at("scale_range").error(rule, message, "scale_range: [2**-16, 1]")
        return
    if given.scales is None:
        return
    here = place.at("scales")
    if not given.scales or any(not scale > 0 for scale in given.scales):
        what = "is empty" if not given.scales else "holds what is no scale: scales are positive"
        yield here.error(rule, f"the set of scales {what}", "scales: [2**-8, 2**-4, 1]")
        return
    bounds = (low, high), (given.scale_min_lower_bound, given.scale_max_upper_bound)
    left = [scale for scale in given.scales if not given.power_of_two_scale or _is_power(scale)]
    left = [s for s in left if all(_or(a, 0.0) <= s <= _or(b, math.inf) for a, b in bounds)]
    by = "power_of_two_scale, scale_range"
    if not left:
        message = f"none of the set is left by {by} and the bounds"
        yield here.error(rule, message, "remove one of them")
    elif len(left) < len(given.scales):
        outside = ", ".join(f"{s:g}" for s in given.scales if s not in left)
        message = f"{outside} cannot be taken: {by} or a bound excludes it"
        yield here.warning(rule, message, "remove it from the set")


_STORED = (torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.float32, torch.float16, torch.bfloat16)


def _stored(given: DTypeWithConstraints, place: Place) -> Iterator[Finding]:
    """``scale_dtype``: E8M0 holds powers of two; E4M3 stands beside a scale for the tensor; others round."""
    here, rule, stored = place.at("scale_dtype"), "scale-domain", given.scale_dtype
    if stored is None:
        return
    if stored not in _STORED:
        fix = "float8_e8m0fnu, float8_e4m3fn, float16 or bfloat16"
        yield here.error(rule, f"scales are not stored in {stored}", fix)
    elif given.scale_exact_match is not None or given.scales is not None:
        message = "scale_dtype leaves nothing to scale_exact_match and scales"
        yield here.error(rule, message, "remove one of them")
    elif stored is torch.float8_e4m3fn and not _has_blocks(given):
        message = "scales in float8_e4m3fn, beside one of the tensor, are those of groups or blocks"
        yield here.error(rule, message, "granularity: per_group(size=16)")


def _has_blocks(given: DTypeWithConstraints) -> bool:
    return Granularity.parse(given.granularity or "per_tensor").has_blocks


def _is_power(scale: float) -> bool:
    return math.frexp(scale)[0] == 0.5


ROLES = ("input_dtype", "output_dtype", "weight_dtype")
_OF_RESULTS = (
    *("bias_scale", "rounding", "requantization", "requantization_ratio"),
    *("bias_step_upper_bound", "table_entries"),
)


def dtype_config_findings(
    configs: Sequence[DTypeConfig], place: Place, entry_where: Condition | None = None
) -> Iterator[Finding]:
    """Everything that the rules of this module say about ``configs``, which are those of an entry with this
    condition.

    >>> twice = [DTypeConfig(is_dynamic=True), DTypeConfig(is_dynamic=True)]
    >>> [finding.rule for finding in dtype_config_findings(twice, Place(0, "torch.add"))]
    ['dtype-config-shadowed']
    """
    for index, config in enumerate(configs):
        here = place.at(f"dtype_configs[{index}]")
        for role in ROLES:
            yield from constraint_findings(_constraints(config, role), here.at(role))
        for judge in (_dynamic, _granularity, _bias_scale, _requantization, _table, _ratio):
            yield from judge(config, here)
        yield from _bias_step(config, here)
        yield from _condition(config, entry_where, here)
        earlier = next((i for i in range(index) if subsumes(configs[i], config)), None)
        if earlier is not None:
            same = configs[earlier] == config
            says = "is the same as" if same else "admits nothing beyond"
            message = f"{says} dtype_configs[{earlier}], which is tried first"
            fix = "remove it" if same else "remove it, or put it first"
            yield here.warning("dtype-config-shadowed", message, fix)


def _constraints(config: DTypeConfig, role: str) -> DTypeWithConstraints:
    constraints: DTypeWithConstraints = getattr(config, f"{role}_with_constraints")
    return constraints


def _condition(
    config: DTypeConfig, entry_where: Condition | None, place: Place
) -> Iterator[Finding]:
    own, common = conjuncts(config.where), conjuncts(entry_where)
    for message in contradictions(AllOf((*common, *own))) if own else ():
        yield place.at("where").error("contradiction", message, "loosen one of them")


def subsumes(wide: DTypeConfig, narrow: DTypeConfig) -> bool:
    """Whether everything that ``narrow`` admits is admitted by ``wide``.

    >>> import torch
    >>> bounded = DTypeConfig(DTypeWithConstraints(torch.quint8, quant_max_upper_bound=127))
    >>> subsumes(DTypeConfig(torch.quint8), bounded), subsumes(bounded, DTypeConfig(torch.quint8))
    (True, False)
    """
    return (
        bool(wide.is_dynamic) == bool(narrow.is_dynamic)
        and all(
            getattr(wide, name) in (None, getattr(narrow, name))
            for name in ("bias_dtype", *_OF_RESULTS)
        )
        and set(conjuncts(wide.where)) <= set(conjuncts(narrow.where))
        and all(_wider(_constraints(wide, role), _constraints(narrow, role)) for role in ROLES)
    )


def _wider(wide: DTypeWithConstraints, narrow: DTypeWithConstraints) -> bool:
    """Whether each constraint of ``wide`` holds where those of ``narrow`` do."""
    if wide.dtype is None:
        return True
    for name, bound in wide.to_dict().items():
        other = getattr(narrow, name)
        if name.endswith("_lower_bound"):
            holds = other is not None and bound <= other
        elif name.endswith("_upper_bound"):
            holds = other is not None and bound >= other
        else:
            holds = bound == other
        if not holds:
            return False
    return True


def _dynamic(config: DTypeConfig, place: Place) -> Iterator[Finding]:
    if config.is_dynamic and integer_range(config.output_dtype) is not None:
        message = f"is_dynamic with the output dtype {config.output_dtype}: the output is float"
        yield place.at("output_dtype").error("dynamic-output", message, "output_dtype: float32")
    if config.is_dynamic and _demands_a_measured_scale(config.input_dtype_with_constraints):
        message = (
            "is_dynamic, whose scales are chosen at each call, with demands on the input's scale"
        )
        yield place.at("input_dtype").error("dynamic-scale", message, "remove the demands")


def _demands_a_measured_scale(given: DTypeWithConstraints) -> bool:
    """Whether a constraint needs a scale that calibration measures; of blocks that are quantized at each
    call only the dtype of the scales can be described.
    """
    if _has_blocks(given):
        given = replace(given, scale_dtype=None)
    return given.produces_scales


def _granularity(config: DTypeConfig, place: Place) -> Iterator[Finding]:
    for role in ROLES:
        shared = Granularity.parse(_constraints(config, role).granularity or "per_tensor")
        by_token = shared.kind == "per_token"
        if not (by_token or shared.has_blocks):
            continue
        here, rule = place.at(role).at("granularity"), "granularity-of"
        if role == "weight_dtype" and by_token:
            message = "a weight has no tokens: they are those of an input at each call"
            yield here.error(rule, message, "granularity: per_channel")
        elif role == "input_dtype" and not config.is_dynamic:
            message = f"scales {shared.words} are chosen at each call, and the input's are measured before"
            fix = "is_dynamic: true, with output_dtype: float32, or granularity: per_tensor"
            yield here.error(rule, message, fix)
        elif role == "output_dtype":
            message = f"results have one scale, not one {shared.words}"
            yield here.error(rule, message, "granularity: per_tensor")


def _bias_scale(config: DTypeConfig, place: Place) -> Iterator[Finding]:
    rule, here, bias = "bias-scale", place.at("bias_scale"), config.bias_dtype
    if config.bias_scale is None:
        if integer_range(bias) is not None:
            message = f"the bias dtype {bias} without a rule for its scale"
            yield place.at("bias_dtype").error(rule, message, "bias_scale: input_times_weight")
        return
    says = f"bias_scale {config.bias_scale}"
    if integer_range(bias) is None:
        yield here.error(rule, f"{says} with the bias dtype {bias}", "bias_dtype: int32")
    of_output = config.bias_scale == "output"
    for role in ("output_dtype",) if of_output else ("input_dtype", "weight_dtype"):
        if integer_range(getattr(config, role)) is None:
            yield here.error(rule, f"{says} without a quantized {role}", "remove bias_scale")


def _without_integers(config: DTypeConfig, *roles: str) -> list[str]:
    """Those of ``roles`` whose dtype is no static integer."""
    return [r for r in roles if config.is_dynamic or integer_range(getattr(config, r)) is None]


def _requantization(config: DTypeConfig, place: Place) -> Iterator[Finding]:
    rule, arithmetic = "requantization", config.requantization
    fields = [name for name in ("rounding", "requantization") if getattr(config, name) is not None]
    here = place.at(fields[-1]) if fields else place
    needed = ["output_dtype"] if fields else []
    if arithmetic not in (None, "float"):
        needed += ["input_dtype", *(["weight_dtype"] if config.weight_dtype is not None else [])]
    for role in _without_integers(config, *needed):
        kind, names = "static integer" if config.is_dynamic else "integer", " and ".join(fields)
        yield here.error(rule, f"{names} without a {kind} {role}", f"remove {names}")
    if arithmetic == "fixed_point_twice" and config.rounding not in (None, "half_away"):
        message = f"fixed_point_twice rounds halves up, then away, not {config.rounding}"
        yield here.error(rule, message, "remove rounding, or requantization: fixed_point")
    if arithmetic == "shift" and config.requantization_ratio != "power_of_two":
        tensors = [_constraints(config, role) for role in ROLES]
        if not all(t.power_of_two_scale for t in tensors if t.dtype is not None):
            message = "a shift only, with scales that are not all powers of two"
            fix = "requantization_ratio: power_of_two, or power_of_two_scale: true for all tensors"
            yield here.error(rule, message, fix)


def _table(config: DTypeConfig, place: Place) -> Iterator[Finding]:
    rule, place, entries = "table-entries", place.at("table_entries"), config.table_entries
    ends = integer_range(config.input_dtype)
    if entries is None:
        return
    if ends is None or _without_integers(config, "output_dtype"):
        message = "a table without a static integer input_dtype and output_dtype"
        yield place.error(rule, message, "remove table_entries")
    elif config.weight_dtype is not None:
        message = "a table is for functions of one value, and this has a weight"
        yield place.error(rule, message, "remove table_entries")
    else:
        size, pieces = ends[1] - ends[0] + 1, entries - 1
        between = 1 <= pieces <= size and pieces & (pieces - 1) == 0
        if entries != size and not between:
            message = f"a table of {entries} entries does not divide {size} integers evenly"
            yield place.error(rule, message, f"table_entries: {min(513, size + 1)}, or {size}")


def _bias_step(config: DTypeConfig, place: Place) -> Iterator[Finding]:
    rule, bound = "bias-step", config.bias_step_upper_bound
    here = place.at("bias_step_upper_bound")
    if bound is None:
        return
    if _without_integers(config, *ROLES):
        message = (
            "a bound of scales to each other without a static integer input, weight and output"
        )
        yield here.error(rule, message, "remove bias_step_upper_bound")
    elif bound <= 0:
        message = f"scales are positive, and none is at most {bound}"
        yield here.error(rule, message, "bias_step_upper_bound: 1")


def _ratio(config: DTypeConfig, place: Place) -> Iterator[Finding]:
    rule, ratio, here = "requantization-ratio", config.requantization_ratio, "requantization_ratio"
    if ratio is None:
        return
    for role in _without_integers(config, *ROLES)[:1]:
        message = f"a ratio of scales without a static integer {role}"
        yield place.at(here).error(rule, message, f"remove {here}")
        return
    ends = [] if ratio == "power_of_two" else [end for end in ratio if end is not None]
    if ratio != "power_of_two" and (not ends or ends != sorted(ends) or not ends[0] > 0):
        message = f"{here} {list(ratio)} is no range: ratios are positive, the smaller first"
        yield place.at(here).error(rule, message, f"{here}: [2**-31, 1]")
