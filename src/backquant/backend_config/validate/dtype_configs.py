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

from collections.abc import Iterator, Sequence

from backquant.backend_config.conditions import AllOf, Condition, conjuncts, contradictions
from backquant.backend_config.dtypes import DTypeConfig, DTypeWithConstraints
from backquant.backend_config.validate.constraints import constraint_findings
from backquant.backend_config.validate.finding import Finding, Place
from backquant.dtypes import Granularity, integer_range

ROLES = ("input_dtype", "output_dtype", "weight_dtype")
_LOWER = ("quant_min_lower_bound", "scale_min_lower_bound")
_UPPER = ("quant_max_upper_bound", "scale_max_upper_bound")
_OF_RESULTS = (
    "bias_scale",
    "rounding",
    "requantization",
    "requantization_ratio",
    "bias_step_upper_bound",
    "table_entries",
)
_EQUAL = (
    "scale_exact_match",
    "zero_point_exact_match",
    "symmetric",
    "granularity",
    "ch_axis",
    "power_of_two_scale",
    "scales",
    "scale_range",
    "scale_dtype",
)


def dtype_config_findings(
    configs: Sequence[DTypeConfig], place: Place, entry_where: Condition | None = None
) -> Iterator[Finding]:
    """Everything that the rules of this module and of ``constraints`` say about ``configs``, which are
    those of an entry with this condition.

    >>> twice = [DTypeConfig(is_dynamic=True), DTypeConfig(is_dynamic=True)]
    >>> [finding.rule for finding in dtype_config_findings(twice, Place(0, "torch.add"))]
    ['dtype-config-shadowed']
    """
    for index, config in enumerate(configs):
        here = place.at(f"dtype_configs[{index}]")
        for role in ROLES:
            constraints = getattr(config, f"{role}_with_constraints")
            yield from constraint_findings(constraints, here.at(role))
        yield from _dynamic(config, here)
        yield from _granularity(config, here)
        yield from _bias_scale(config, here)
        yield from _requantization(config, here)
        yield from _table(config, here.at("table_entries"))
        yield from _ratio(config, here.at("requantization_ratio"))
        yield from _bias_step(config, here.at("bias_step_upper_bound"))
        yield from _condition(config, entry_where, here)
        earlier = next((i for i in range(index) if subsumes(configs[i], config)), None)
        if earlier is not None:
            same = configs[earlier] == config
            message = "is the same as" if same else "admits nothing beyond"
            yield here.find(
                "warning",
                "dtype-config-shadowed",
                f"{message} dtype_configs[{earlier}], which is tried first",
                "remove it" if same else "remove it, or put it first",
            )


def _condition(
    config: DTypeConfig, entry_where: Condition | None, place: Place
) -> Iterator[Finding]:
    own, common = conjuncts(config.where), conjuncts(entry_where)
    if own:
        for message in contradictions(AllOf((*common, *own))):
            yield place.at("where").find("error", "contradiction", message, "loosen one of them")


def subsumes(wide: DTypeConfig, narrow: DTypeConfig) -> bool:
    """Whether everything that ``narrow`` admits is admitted by ``wide``.

    >>> import torch
    >>> bounded = DTypeConfig(DTypeWithConstraints(torch.quint8, quant_max_upper_bound=127))
    >>> subsumes(DTypeConfig(torch.quint8), bounded), subsumes(bounded, DTypeConfig(torch.quint8))
    (True, False)
    """
    if bool(wide.is_dynamic) != bool(narrow.is_dynamic):
        return False
    if wide.bias_dtype not in (None, narrow.bias_dtype):
        return False
    if any(getattr(wide, n) not in (None, getattr(narrow, n)) for n in _OF_RESULTS):
        return False
    if not set(conjuncts(wide.where)) <= set(conjuncts(narrow.where)):
        return False
    return all(
        _wider(
            getattr(wide, f"{role}_with_constraints"), getattr(narrow, f"{role}_with_constraints")
        )
        for role in ROLES
    )


def _wider(wide: DTypeWithConstraints, narrow: DTypeWithConstraints) -> bool:
    if wide.dtype is None:
        return True
    if wide.dtype is not narrow.dtype:
        return False
    return (
        all(_at_most(getattr(wide, name), getattr(narrow, name)) for name in _LOWER)
        and all(_at_most(_minus(wide, name), _minus(narrow, name)) for name in _UPPER)
        and all(getattr(wide, name) in (None, getattr(narrow, name)) for name in _EQUAL)
    )


def _at_most(wide: float | None, narrow: float | None) -> bool:
    return wide is None or (narrow is not None and wide <= narrow)


def _minus(given: DTypeWithConstraints, name: str) -> float | None:
    bound: float | None = getattr(given, name)
    return None if bound is None else -bound


def _dynamic(config: DTypeConfig, place: Place) -> Iterator[Finding]:
    if config.is_dynamic and integer_range(config.output_dtype) is not None:
        message = f"is_dynamic with the output dtype {config.output_dtype}: the output is float"
        yield place.at("output_dtype").find(
            "error", "dynamic-output", message, "output_dtype: float32"
        )
    if config.is_dynamic and _demands_a_measured_scale(config.input_dtype_with_constraints):
        message = (
            "is_dynamic, whose scales are chosen at each call, with demands on the input's scale"
        )
        yield place.at("input_dtype").find("error", "dynamic-scale", message, "remove the demands")


def _demands_a_measured_scale(given: DTypeWithConstraints) -> bool:
    """Whether a constraint needs a scale that calibration measures; of blocks that are quantized at each
    call only the dtype of the scales can be described.
    """
    if given.granularity is None or not Granularity.parse(given.granularity).has_blocks:
        return given.produces_scales
    rest = {name: value for name, value in given.to_dict().items() if name != "scale_dtype"}
    return DTypeWithConstraints.from_dict(rest).produces_scales


def _granularity(config: DTypeConfig, place: Place) -> Iterator[Finding]:
    for role in ROLES:
        asked = getattr(config, f"{role}_with_constraints").granularity
        shared = Granularity.parse(asked) if asked else Granularity("per_tensor")
        by_token = shared.kind == "per_token"
        if not (by_token or shared.has_blocks):
            continue
        here, rule = place.at(role).at("granularity"), "granularity-of"
        if role == "weight_dtype" and by_token:
            message = "a weight has no tokens: they are those of an input at each call"
            yield here.find("error", rule, message, "granularity: per_channel")
        elif role == "input_dtype" and not config.is_dynamic:
            message = f"scales {shared.words} are chosen at each call, and the input's are measured before"
            fix = "is_dynamic: true, with output_dtype: float32, or granularity: per_tensor"
            yield here.find("error", rule, message, fix)
        elif role == "output_dtype":
            message = f"results have one scale, not one {shared.words}"
            yield here.find("error", rule, message, "granularity: per_tensor")


def _bias_scale(config: DTypeConfig, place: Place) -> Iterator[Finding]:
    here = place.at("bias_scale")
    if config.bias_scale is None:
        if integer_range(config.bias_dtype) is not None:
            message = f"the bias dtype {config.bias_dtype} without a rule for its scale"
            yield place.at("bias_dtype").find(
                "error", "bias-scale", message, "bias_scale: input_times_weight"
            )
        return
    if integer_range(config.bias_dtype) is None:
        message = f"bias_scale {config.bias_scale} with the bias dtype {config.bias_dtype}"
        yield here.find("error", "bias-scale", message, "bias_dtype: int32")
    sources = (
        ("output_dtype",) if config.bias_scale == "output" else ("input_dtype", "weight_dtype")
    )
    for role in sources:
        if integer_range(getattr(config, role)) is None:
            message = f"bias_scale {config.bias_scale} without a quantized {role}"
            yield here.find("error", "bias-scale", message, "remove bias_scale")


def _requantization(config: DTypeConfig, place: Place) -> Iterator[Finding]:
    rule, arithmetic = "requantization", config.requantization
    fields = [name for name in ("rounding", "requantization") if getattr(config, name) is not None]
    here = place.at(fields[-1]) if fields else place
    needed = ["output_dtype"] if fields else []
    if arithmetic not in (None, "float"):
        needed += ["input_dtype", *(["weight_dtype"] if config.weight_dtype is not None else [])]
    for role in needed:
        if integer_range(getattr(config, role)) is None or config.is_dynamic:
            kind = "static integer" if config.is_dynamic else "integer"
            message = f"{' and '.join(fields)} without a {kind} {role}"
            yield here.find("error", rule, message, f"remove {' and '.join(fields)}")
    if arithmetic == "fixed_point_twice" and config.rounding not in (None, "half_away"):
        message = f"fixed_point_twice rounds halves up, then away, not {config.rounding}"
        yield here.find("error", rule, message, "remove rounding, or requantization: fixed_point")
    if arithmetic == "shift":
        tensors = [getattr(config, f"{role}_with_constraints") for role in ROLES]
        tensors = [tensor for tensor in tensors if tensor.dtype is not None]
        by_ratio = config.requantization_ratio == "power_of_two"
        if not by_ratio and not all(t.power_of_two_scale for t in tensors):
            message = "a shift only, with scales that are not all powers of two"
            fix = "requantization_ratio: power_of_two, or power_of_two_scale: true for all tensors"
            yield here.find("error", rule, message, fix)


def _table(config: DTypeConfig, place: Place) -> Iterator[Finding]:
    rule, entries = "table-entries", config.table_entries
    if entries is None:
        return
    ends = integer_range(config.input_dtype)
    if ends is None or integer_range(config.output_dtype) is None or config.is_dynamic:
        message = "a table without a static integer input_dtype and output_dtype"
        yield place.find("error", rule, message, "remove table_entries")
    elif config.weight_dtype is not None:
        message = "a table is for functions of one value, and this has a weight"
        yield place.find("error", rule, message, "remove table_entries")
    else:
        size, pieces = ends[1] - ends[0] + 1, entries - 1
        between = 1 <= pieces <= size and pieces & (pieces - 1) == 0
        if entries != size and not between:
            message = f"a table of {entries} entries does not divide {size} integers evenly"
            yield place.find(
                "error", rule, message, f"table_entries: {min(513, size + 1)}, or {size}"
            )


def _bias_step(config: DTypeConfig, place: Place) -> Iterator[Finding]:
    rule, bound = "bias-step", config.bias_step_upper_bound
    if bound is None:
        return
    if any(integer_range(getattr(config, role)) is None for role in ROLES) or config.is_dynamic:
        message = (
            "a bound of scales to each other without a static integer input, weight and output"
        )
        yield place.find("error", rule, message, "remove bias_step_upper_bound")
    elif bound <= 0:
        message = f"scales are positive, and none is at most {bound}"
        yield place.find("error", rule, message, "bias_step_upper_bound: 1")


def _ratio(config: DTypeConfig, place: Place) -> Iterator[Finding]:
    rule, ratio = "requantization-ratio", config.requantization_ratio
    if ratio is None:
        return
    for role in ROLES:
        if integer_range(getattr(config, role)) is None or config.is_dynamic:
            message = f"a ratio of scales without a static integer {role}"
            yield place.find("error", rule, message, "remove requantization_ratio")
            return
    if ratio == "power_of_two":
        return
    ends = [end for end in ratio if end is not None]
    if not ends or not all(end > 0 for end in ends) or ends != sorted(ends):
        message = f"requantization_ratio {list(ratio)} is no range: ratios are positive, the smaller first"
        yield place.find("error", rule, message, "requantization_ratio: [2**-31, 1]")
