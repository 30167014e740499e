"""Which dtypes, under which constraints, a pattern admits.

Dtypes are tokens, compared literally: ``torch.quint8`` and ``torch.uint8`` are two that share a storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, Literal

import torch

from backquant.backend_config.checks import dtype_fix, renamed
from backquant.backend_config.declared import OURS, Phrase, Record, documented
from backquant.backend_config.import_paths import Resolver
from backquant.backend_config.kinds import (
    Conditional,
    Kind,
    Number,
    Numbers,
    SharedBy,
    Where,
    WordOrEnds,
    record_from,
)
from backquant.backend_config.layout import Layout, one_of, ref
from backquant.dtypes import Granularity
from backquant.errors import SpecError

#: input × weight / output scale: a power of two, or between two ends of which one may be open.
Ratio = Literal["power_of_two"] | tuple[float | None, float | None]


@documented
@dataclass(repr=False)
class DTypeWithConstraints(Record):
    """A dtype with the constraints that a backend puts on values quantized to it. ``None``: no constraint.

    The first seven fields are those of PyTorch 2.x. Raises ``SpecError`` for another kind of value.

    >>> DTypeWithConstraints(torch.qint8, quant_min_lower_bound=-127, scale_min_lower_bound=2**-12)
    DTypeWithConstraints(dtype=torch.qint8, quant_min_lower_bound=-127, \
scale_min_lower_bound=2**-12)
    """

    dtype: torch.dtype | None = None
    quant_min_lower_bound: Annotated[
        int | float | None, "The requested range must not begin below; enforced on its own."
    ] = None
    quant_max_upper_bound: Annotated[
        int | float | None, "The requested range must not end above; enforced on its own."
    ] = None
    scale_min_lower_bound: Annotated[int | float | None, Phrase("scale ≥ {}")] = None
    scale_max_upper_bound: Annotated[int | float | None, Phrase("scale ≤ {}")] = None
    scale_exact_match: Annotated[float | None, Phrase("scale = {}")] = None
    zero_point_exact_match: Annotated[
        int | None,
        "Alone, the scale is chosen so that the range around it holds what was measured.",
        Phrase("zero point = {}"),
    ] = None
    symmetric: Annotated[
        bool | None,
        OURS,
        "true: a symmetric scheme only (zero point in the middle of the range); false: affine only.",
        Phrase("symmetric", "affine"),
    ] = None
    granularity: Annotated[
        str | None,
        OURS,
        SharedBy(),
        "Which values share a scale; without it: those of a tensor, or of a channel.",
        Phrase("{}"),
    ] = None
    ch_axis: Annotated[
        int | None, OURS, "The channel axis when per_channel.", Phrase("channels on axis {}")
    ] = None
    power_of_two_scale: Annotated[
        bool | None,
        OURS,
        "A measured scale is raised to the next power of two.",
        Phrase("power-of-two scale"),
    ] = None
    scales: Annotated[
        tuple[float, ...] | None,
        OURS,
        Numbers(),
        "The scales that the hardware has; the next one above is taken.",
        Phrase("scale {}"),
    ] = None
    scale_range: Annotated[
        tuple[float | None, float | None] | None,
        OURS,
        Numbers(ends=True),
        "Smallest and largest scale; what is measured is moved into it, where bounds would refuse it.",
        Phrase("scale {}"),
    ] = None
    scale_dtype: Annotated[
        torch.dtype | None,
        OURS,
        "What scales are stored in: float8_e8m0fnu (powers of two by the rule of OCP's MX formats), "
        "float8_e4m3fn (beside one float32 scale for the tensor: NVFP4), float16 or bfloat16 (rounded).",
        Phrase("scales in {}"),
    ] = None

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


class TensorDType(Kind):
    """A dtype with its constraints, or a dtype alone, which stands for one without any."""

    stored = "{}_with_constraints"

    @property
    def default(self) -> Any:
        return _UNCONSTRAINED

    @property
    def layout(self) -> Layout:
        expected = "a dtype name, or a mapping with the key dtype"
        members = one_of(expected, ref("DTypeName"), DTypeWithConstraints.layout())
        return {"named": "TensorDType", **members}

    def write(self, value: Any) -> Any:
        data = value.written()
        return data["dtype"] if list(data) == ["dtype"] else data

    def read(self, data: Any, resolver: Resolver) -> Any:
        mapping = {"dtype": data} if isinstance(data, str) else data
        return DTypeWithConstraints.read(mapping, resolver)

    def check(self, value: Any, field: str) -> DTypeWithConstraints:
        if value is None or isinstance(value, torch.dtype):
            return DTypeWithConstraints(dtype=value)
        found: DTypeWithConstraints | None = record_from(DTypeWithConstraints, value, field)
        if found is not None:
            return found
        raise SpecError(
            f"{field} must be a torch.dtype or DTypeWithConstraints, got {value!r}",
            where=field,
            fix=dtype_fix(value),
        )

    def source(self, value: Any) -> str:
        alone = value == DTypeWithConstraints(value.dtype)
        return repr(value.dtype if alone else value)


TENSOR = TensorDType()
_UNCONSTRAINED = DTypeWithConstraints()


class _Role:
    """An attribute that is the dtype alone; its constraints are beside it, under PyTorch's name."""

    def __set_name__(self, _: type, name: str) -> None:
        self.name, self.stored = name, TENSOR.stored.format(name)

    def __get__(self, config: Any, _: Any = None) -> torch.dtype | None:
        return None if config is None else getattr(config, self.stored).dtype

    def __set__(self, config: Any, value: torch.dtype | DTypeWithConstraints | None) -> None:
        setattr(config, self.stored, TENSOR.check(value, self.name))


@dataclass(frozen=True, repr=False)
class Tolerance(Record):
    """By how many ``steps`` results may be off: integers, or 255ths of the range of float results.

    ``reason``: why they are off (the kernel rounds twice, its table holds floats). Operators that only move
    values have no tolerance. Raises ``SpecError`` for less than 0 steps, and without a reason.

    >>> print(Tolerance(1, "requantized in float32"))
    1 step: requantized in float32
    """

    steps: Annotated[
        int | float,
        Number(least=0),
        "Of integers; of results in float: of the 255 parts of their range.",
    ]
    reason: Annotated[str, "What the engine computes otherwise."]

    def __str__(self) -> str:
        return f"{self.steps:g} step{'' if self.steps == 1 else 's'}: {self.reason}"


@documented
@dataclass(repr=False)
class DTypeConfig(Record):
    """One combination of dtypes that a pattern admits.

    The dtypes are those of the quantize operators of the reference model,
    ``quant1 - [dequant1 - float operator - quant2] - dequant2``, not those of the tensors that the
    operator sees: under dynamic quantization the input dtype is still ``torch.quint8``.
    ``input_dtype``, ``output_dtype`` and ``weight_dtype`` are a ``torch.dtype``, a
    ``DTypeWithConstraints``, or None (not constrained).

    PyTorch's class has the first five fields. The reference model follows all but ``table_entries``: it
    computes the function itself; the integer reference has the table.

    Raises ``SpecError`` for values of another kind.

    >>> config = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
    >>> config.weight_dtype
    torch.qint8
    >>> config
    DTypeConfig(input_dtype=torch.quint8, output_dtype=torch.quint8, weight_dtype=torch.qint8, \
bias_dtype=torch.float32)
    """

    input_dtype: Annotated[_Role, TENSOR] = _Role()
    output_dtype: Annotated[_Role, TENSOR] = _Role()
    weight_dtype: Annotated[_Role, TENSOR] = _Role()
    bias_dtype: Annotated[torch.dtype | None, Phrase("bias {}")] = None
    is_dynamic: Annotated[bool | None, Phrase("dynamic", "not dynamic")] = None
    _: KW_ONLY
    bias_scale: Annotated[
        Literal["input_times_weight", "output"] | None,
        OURS,
        "The bias is quantized, with this scale.",
        Phrase("bias scale = {}"),
    ] = None
    rounding: Annotated[
        Literal["half_even", "half_up", "half_away"] | None,
        OURS,
        "How results are rounded.",
        Phrase("rounded {}"),
    ] = None
    requantization: Annotated[
        Literal["float", "fixed_point", "fixed_point_twice", "fixed_point_16", "shift"] | None,
        OURS,
        "By which arithmetic sums become results; see backquant.dtypes.arithmetic.",
        Phrase("requantized by {}"),
    ] = None
    table_entries: Annotated[
        int | None,
        OURS,
        Number(whole=True, least=2),
        "Of the hardware's table of a function of one value: it interpolates; without it: one per integer.",
        Phrase("from a table of {}"),
    ] = None
    tolerance: Annotated[
        Tolerance | None,
        OURS,
        "How far results may be from the integer reference; without it: not at all. conform reads it.",
        Phrase("off by {value.steps:g} at most"),
    ] = None
    requantization_ratio: Annotated[
        Ratio | None,
        OURS,
        WordOrEnds("power_of_two"),
        "What input scale × weight scale / output scale may be; scales are chosen accordingly.",
        Phrase("input × weight / output scale {}"),
    ] = None
    bias_step_upper_bound: Annotated[
        int | float | None,
        OURS,
        "What input scale × weight scale / output scale may be at most beside a bias, which the hardware "
        "rounds to whole products; judged after calibration.",
        Phrase("bias step ≤ {}"),
    ] = None
    where: Annotated[
        Conditional,
        OURS,
        Where(),
        "The uses of the operator that are admitted so.",
        Phrase("where {}"),
    ] = Conditional()  # noqa: RUF009 - a descriptor
    input_dtype_with_constraints: DTypeWithConstraints = field(init=False)
    output_dtype_with_constraints: DTypeWithConstraints = field(init=False)
    weight_dtype_with_constraints: DTypeWithConstraints = field(init=False)

    def __deepcopy__(self, _: dict[int, Any]) -> DTypeConfig:
        return self.copy()

    def copy(self) -> DTypeConfig:
        """The same with constraints of its own.

        >>> DTypeConfig(torch.quint8).copy()
        DTypeConfig(input_dtype=torch.quint8)
        """
        new = object.__new__(DTypeConfig)
        values = new.__dict__
        values.update(self.__dict__)
        for name, value in values.items():
            if type(value) is DTypeWithConstraints:
                values[name] = object.__new__(DTypeWithConstraints)
                values[name].__dict__.update(value.__dict__)
        return new  # what else it holds does not change

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DTypeConfig:
        """Build from a dict with the fields' names as keys, all optional; ``bias_type``: ``bias_dtype``.

        ``input_dtype``, ``output_dtype``, ``weight_dtype``: a ``torch.dtype``, a
        ``DTypeWithConstraints``, or a dict of the latter's fields.
        Raises ``SpecError`` (a ``ValueError``) for another key or kind of value.

        >>> DTypeConfig.from_dict({"input_dtype": torch.quint8, "bias_type": torch.float})
        DTypeConfig(input_dtype=torch.quint8, bias_dtype=torch.float32)
        """
        return super().from_dict(renamed(values, "bias_type", "bias_dtype"))
