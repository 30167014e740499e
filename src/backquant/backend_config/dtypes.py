"""Which dtypes, under which constraints, a pattern admits.

Dtypes are tokens, compared literally: ``torch.quint8`` and ``torch.uint8`` are two that share a storage.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from backquant.backend_config.checks import (
    check_bool,
    check_choice,
    check_dtype,
    check_keys,
    check_number,
    dtype_fix,
    renamed,
    within,
)
from backquant.backend_config.conditions.condition import (
    Condition,
    condition_data,
    condition_from,
)
from backquant.backend_config.numbers import number_text
from backquant.backend_config.tolerance import Tolerance, tolerance_from
from backquant.dtypes import Granularity
from backquant.errors import SpecError

_DTYPE_CONFIG_KEYS = (
    "input_dtype",
    "output_dtype",
    "weight_dtype",
    "bias_dtype",
    "is_dynamic",
    "bias_scale",
    "rounding",
    "requantization",
    "table_entries",
    "tolerance",
    "requantization_ratio",
    "bias_step_upper_bound",
    "where",
)
#: How the results of weighted operators may be rounded, and by which arithmetic they are made of sums.
ROUNDINGS = ("half_even", "half_up", "half_away")
REQUANTIZATIONS = ("float", "fixed_point", "fixed_point_twice", "shift")
BIAS_SCALES = ("input_times_weight", "output")
_OWN = tuple(key for key in _DTYPE_CONFIG_KEYS[3:] if key not in ("tolerance", "where"))
#: input × weight / output scale: a power of two, or between two ends of which one may be open.
Ratio = Literal["power_of_two"] | tuple[float | None, float | None]


@dataclass(repr=False)
class DTypeWithConstraints:
    """A dtype with the constraints that a backend puts on values quantized to it. ``None``: no constraint.

    * ``quant_min_lower_bound``, ``quant_max_upper_bound``: the requested quantized range must lie
      within; each bound is enforced on its own.
    * ``scale_min_lower_bound``, ``scale_max_upper_bound``: limits of the scale.
    * ``scale_exact_match``, ``zero_point_exact_match``: fixed quantization parameters. With a fixed zero
      point alone, the scale is chosen so that the range around it holds what was measured.
    * ``symmetric``: True demands a symmetric scheme (zero point fixed at the middle of the range),
      False an affine one.
    * ``granularity``: which values share a scale (``backquant.dtypes.Granularity``): ``"per_tensor"``,
      ``"per_group(size=128)"``, …; None: per tensor or per channel. ``ch_axis``: the channel axis.
    * ``power_of_two_scale``: if True, a measured scale is raised to the next power of two.
    * ``scales``: the scales that the hardware has; a measured scale is raised to the next of them.
    * ``scale_range``: smallest and largest scale, either may be None; a measured scale outside is moved to
      the nearer end (where ``scale_min_lower_bound`` would refuse it).
    * ``scale_dtype``: how scales are stored. ``torch.float8_e8m0fnu``: as powers of two by the rule of OCP's
      MX formats; ``torch.float8_e4m3fn``: rounded to it, beside one float32 scale for the tensor (NVFP4);
      ``torch.float16``, ``torch.bfloat16``: rounded to it.

    The first seven fields are those of PyTorch 2.x. Raises ``SpecError`` for another kind of value.

    >>> DTypeWithConstraints(torch.qint8, quant_min_lower_bound=-127, scale_min_lower_bound=2**-12)
    DTypeWithConstraints(dtype=torch.qint8, quant_min_lower_bound=-127, \
scale_min_lower_bound=2**-12)
    """

    dtype: torch.dtype | None = None
    quant_min_lower_bound: int | float | None = None
    quant_max_upper_bound: int | float | None = None
    scale_min_lower_bound: int | float | None = None
    scale_max_upper_bound: int | float | None = None
    scale_exact_match: float | None = None
    zero_point_exact_match: int | None = None
    symmetric: bool | None = None
    granularity: str | None = None
    ch_axis: int | None = None
    power_of_two_scale: bool | None = None
    scales: tuple[float, ...] | None = None
    scale_range: tuple[float | None, float | None] | None = None
    scale_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_dtype(self.dtype, "dtype")
        check_dtype(self.scale_dtype, "scale_dtype")
        for name in (
            "quant_min_lower_bound",
            "quant_max_upper_bound",
            "scale_min_lower_bound",
            "scale_max_upper_bound",
            "scale_exact_match",
        ):
            check_number(getattr(self, name), name)
        check_number(self.zero_point_exact_match, "zero_point_exact_match", (int,))
        check_number(self.ch_axis, "ch_axis", (int,))
        self.granularity = _granularity(self.granularity)
        check_bool(self.symmetric, "symmetric")
        check_bool(self.power_of_two_scale, "power_of_two_scale")
        for name in ("scales", "scale_range"):
            self._check_numbers(name)

    def _check_numbers(self, name: str) -> None:
        given: Any = getattr(self, name)
        if given is None:
            return
        if not isinstance(given, (tuple, list)) or (name == "scale_range" and len(given) != 2):
            wanted = "a list of scales" if name == "scales" else "two scales, smallest and largest"
            raise SpecError(f"{name} must be {wanted}, got {given!r}", where=name)
        for index, value in enumerate(given):
            check_number(value, f"{name}[{index}]")
        setattr(self, name, tuple(None if v is None else float(v) for v in given))

    @property
    def channel_axis(self) -> int | None:
        """The axis that channels have to lie on: ``ch_axis``, or that of the granularity.

        >>> DTypeWithConstraints(torch.qint8, granularity="per_channel(axis=1)").channel_axis
        1
        """
        shared = Granularity.parse(self.granularity or "per_tensor")
        return shared.axis if self.ch_axis is None and not shared.has_blocks else self.ch_axis

    @property
    def produces_scales(self) -> bool:
        """Whether the constraints change measured qparams, instead of only judging them."""
        alone = self.zero_point_exact_match is not None and self.scale_exact_match is None
        demanded = (
            self.power_of_two_scale or self.scales is not None or self.scale_range is not None
        )
        demanded = demanded or self.scale_dtype is not None
        return self.dtype is not None and bool(demanded or alone)

    @classmethod
    def from_dict(cls, constraints: Mapping[str, Any]) -> DTypeWithConstraints:
        """Build from a dict with the fields' names as keys, all optional.

        Raises ``SpecError`` for an unknown key.

        >>> DTypeWithConstraints.from_dict({"dtype": torch.quint8, "quant_max_upper_bound": 127})
        DTypeWithConstraints(dtype=torch.quint8, quant_max_upper_bound=127)
        """
        check_keys(constraints, [field.name for field in fields(cls)], "DTypeWithConstraints")
        return cls(**constraints)

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set, by name.

        >>> DTypeWithConstraints(torch.quint8, symmetric=False).to_dict()
        {'dtype': torch.quint8, 'symmetric': False}
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={number_text(v)}" for name, v in self.to_dict().items())
        return f"DTypeWithConstraints({inside})"


@dataclass(init=False, repr=False)
class DTypeConfig:
    """One combination of dtypes that a pattern admits.

    The dtypes are those of the quantize operators of the reference model,
    ``quant1 - [dequant1 - float operator - quant2] - dequant2``, not those of the tensors that the
    operator sees: under dynamic quantization the input dtype is still ``torch.quint8``.
    ``input_dtype``, ``output_dtype`` and ``weight_dtype`` are a ``torch.dtype``, a
    ``DTypeWithConstraints``, or None (not constrained).

    Fields that PyTorch has not:

    * ``bias_scale``: the bias is quantized, with the scale ``"input_times_weight"`` or that of the
      ``"output"``.
    * ``rounding``: how results are rounded: ``"half_even"``, ``"half_up"``, ``"half_away"``.
    * ``requantization``: the arithmetic that turns sums into results; see
      ``backquant.dtypes.requantization``.
    * ``requantization_ratio``: input scale × weight scale / output scale must be a ``"power_of_two"``, or lie
      between two numbers (None: no bound). Scales are chosen accordingly.
    * ``bias_step_upper_bound``: input scale × weight scale / output scale may be no more than that where the
      bias is not 0: the hardware rounds it to whole products. Judged after calibration.
    * ``table_entries``: the size of the hardware's lookup table for a function of one value (sigmoid, the
      exponential of softmax), between whose entries it interpolates
      (``backquant.dtypes.interpolated_table``). None: one entry for each integer.
    * ``tolerance``: how far an engine's results may be from the integer reference (``Tolerance``, or its
      mapping); None: not at all. Only ``backquant.conform`` reads it.
    * ``where``: conditions on the operator, such as ``{"groups": 1}``; see
      ``BackendPatternConfig.set_where``.

    The reference model follows all of these but ``table_entries``: it computes the function itself; the
    integer reference has the table.

    Raises ``SpecError`` for values of another kind.

    >>> config = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
    >>> config.weight_dtype
    torch.qint8
    >>> config
    DTypeConfig(input_dtype=torch.quint8, output_dtype=torch.quint8, weight_dtype=torch.qint8, \
bias_dtype=torch.float32)
    """

    input_dtype_with_constraints: DTypeWithConstraints
    output_dtype_with_constraints: DTypeWithConstraints
    weight_dtype_with_constraints: DTypeWithConstraints
    bias_dtype: torch.dtype | None
    is_dynamic: bool | None
    bias_scale: Literal["input_times_weight", "output"] | None
    rounding: Literal["half_even", "half_up", "half_away"] | None
    requantization: Literal["float", "fixed_point", "fixed_point_twice", "shift"] | None
    table_entries: int | None
    tolerance: Tolerance | None
    requantization_ratio: Ratio | None
    bias_step_upper_bound: int | float | None
    where: Condition | None

    def __init__(  # size: PyTorch's arguments, and demands by keyword
        self,
        input_dtype: torch.dtype | DTypeWithConstraints | None = None,
        output_dtype: torch.dtype | DTypeWithConstraints | None = None,
        weight_dtype: torch.dtype | DTypeWithConstraints | None = None,
        bias_dtype: torch.dtype | None = None,
        is_dynamic: bool | None = None,
        *,
        bias_scale: Literal["input_times_weight", "output"] | None = None,
        rounding: Literal["half_even", "half_up", "half_away"] | None = None,
        requantization: Literal["float", "fixed_point", "fixed_point_twice", "shift"] | None = None,
        table_entries: int | None = None,
        tolerance: Tolerance | Mapping[str, Any] | None = None,
        requantization_ratio: Ratio | None = None,
        bias_step_upper_bound: int | float | None = None,
        where: Condition | Mapping[str, Any] | None = None,
    ) -> None:
        self.input_dtype_with_constraints = _constrained(input_dtype, "input_dtype")
        self.output_dtype_with_constraints = _constrained(output_dtype, "output_dtype")
        self.weight_dtype_with_constraints = _constrained(weight_dtype, "weight_dtype")
        check_dtype(bias_dtype, "bias_dtype")
        check_bool(is_dynamic, "is_dynamic")
        check_choice(bias_scale, "bias_scale", BIAS_SCALES)
        check_choice(rounding, "rounding", ROUNDINGS)
        check_choice(requantization, "requantization", REQUANTIZATIONS)
        check_number(table_entries, "table_entries", (int,))
        self.rounding, self.requantization = rounding, requantization
        self.table_entries = table_entries
        self.requantization_ratio = _ratio(requantization_ratio)
        check_number(bias_step_upper_bound, "bias_step_upper_bound")
        self.bias_step_upper_bound = bias_step_upper_bound
        self.bias_dtype = bias_dtype
        self.is_dynamic = is_dynamic
        self.bias_scale = bias_scale
        with within("tolerance"):
            self.tolerance = tolerance_from(tolerance)
        with within("where"):
            self.where = condition_from(where)

    def __deepcopy__(self, _: dict[int, Any]) -> DTypeConfig:
        made = copy.copy(self)
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, DTypeWithConstraints):
                setattr(made, part.name, copy.copy(value))
        return made  # what else it holds does not change

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The input dtype without its constraints."""
        return self.input_dtype_with_constraints.dtype

    @property
    def output_dtype(self) -> torch.dtype | None:
        """The output dtype without its constraints."""
        return self.output_dtype_with_constraints.dtype

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The weight dtype without its constraints."""
        return self.weight_dtype_with_constraints.dtype

    @classmethod
    def from_dict(cls, dtype_config_dict: Mapping[str, Any]) -> DTypeConfig:
        """Build from a dict with these keys, all optional.

        ``input_dtype``, ``output_dtype``, ``weight_dtype``: a ``torch.dtype``, a
        ``DTypeWithConstraints``, or a dict of the latter's fields; ``bias_dtype`` (also written
        ``bias_type``): a ``torch.dtype``; ``is_dynamic``: bool; ``bias_scale``; ``rounding``;
        ``requantization``; ``requantization_ratio``; ``bias_step_upper_bound``; ``table_entries``;
        ``tolerance``; ``where``.
        Raises ``SpecError`` (a ``ValueError``) for another key or kind of value.

        >>> DTypeConfig.from_dict({"input_dtype": torch.quint8, "bias_type": torch.float})
        DTypeConfig(input_dtype=torch.quint8, bias_dtype=torch.float32)
        """
        given = renamed(dtype_config_dict, "bias_type", "bias_dtype")
        check_keys(given, _DTYPE_CONFIG_KEYS, "DTypeConfig")
        values = dict(given)
        for key in ("input_dtype", "output_dtype", "weight_dtype"):
            if isinstance(values.get(key), Mapping):
                with within(key):
                    values[key] = DTypeWithConstraints.from_dict(values[key])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set, with the keys of ``from_dict``; dtypes with their constraints.

        >>> sorted(DTypeConfig(torch.quint8, is_dynamic=True).to_dict())
        ['input_dtype', 'is_dynamic']
        """
        values: dict[str, Any] = {}
        for key in ("input_dtype", "output_dtype", "weight_dtype"):
            constrained = getattr(self, f"{key}_with_constraints")
            if constrained != DTypeWithConstraints():
                values[key] = constrained
        for key in _OWN:
            if getattr(self, key) is not None:
                values[key] = getattr(self, key)
        if self.tolerance is not None:
            values["tolerance"] = self.tolerance.to_dict()
        if self.where is not None:
            values["where"] = condition_data(self.where)
        return values

    def __repr__(self) -> str:
        values = self.to_dict()
        for key, value in values.items():
            if value == DTypeWithConstraints(getattr(value, "dtype", None)):
                values[key] = value.dtype
        return f"DTypeConfig({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def as_dtype_config(value: Any) -> DTypeConfig:
    """``value`` itself, or the ``DTypeConfig`` of its dict; else ``SpecError``.

    >>> as_dtype_config({"input_dtype": torch.quint8})
    DTypeConfig(input_dtype=torch.quint8)
    """
    if isinstance(value, DTypeConfig):
        return value
    if isinstance(value, Mapping):
        return DTypeConfig.from_dict(value)
    raise SpecError(
        f"expected a DTypeConfig or its dict, got {value!r}",
        fix="DTypeConfig(input_dtype=torch.quint8, output_dtype=torch.quint8)",
    )


def _constrained(value: Any, field: str) -> DTypeWithConstraints:
    if isinstance(value, DTypeWithConstraints):
        return value
    if value is None or isinstance(value, torch.dtype):
        return DTypeWithConstraints(dtype=value)
    raise SpecError(
        f"{field} must be a torch.dtype or DTypeWithConstraints, got {value!r}",
        where=field,
        fix=dtype_fix(value),
    )


def _ratio(value: Any) -> Ratio | None:
    if value is None:
        return None
    if value == "power_of_two":
        return "power_of_two"
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        message = f"requantization_ratio must be power_of_two, or two numbers, got {value!r}"
        raise SpecError(message, where="requantization_ratio", fix="[2**-31, 1]")
    for index, end in enumerate(value):
        check_number(end, f"requantization_ratio[{index}]")
    low, high = (None if end is None else float(end) for end in value)
    return low, high


def _granularity(value: Any) -> str | None:
    """Its one spelling."""
    if value is None:
        return None
    if not isinstance(value, str | Granularity):
        what = f"granularity must be a word, got {value!r}"
        raise SpecError(what, where="granularity", fix='"per_group(size=128)"')
    return str(Granularity.parse(str(value)))
