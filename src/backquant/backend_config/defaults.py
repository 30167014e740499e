"""What a backend quantizes with when the user asks for nothing in particular, as data.

Nothing here measures anything: the qconfig room turns these records into observers and fake
quantizes. Operators with fixed quantization parameters are not listed; they follow from the entries
whose constraints carry ``scale_exact_match`` and ``zero_point_exact_match``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch

from backquant.backend_config.declared import (
    Earlier,
    Phrase,
    Record,
    earlier_names,
    fields_of,
    phrases,
)
from backquant.backend_config.kinds import Choice, Nested, Operators, SharedBy, WordOrModule
from backquant.backend_config.leave_float import LeaveFloat
from backquant.backend_config.naming import operator_name
from backquant.errors import SpecError

#: How a tensor is measured.
OBSERVERS = (
    "histogram",
    "minmax",
    "moving_average_minmax",
    "per_channel_minmax",
    "moving_average_per_channel_minmax",
    "block_minmax",  # of groups and blocks
    "block_mse",
    "placeholder",  # measures nothing; carries the dtype
    "noop",  # leaves the tensor alone
    "reuse_input",  # the observer of the operator's input
)

#: How a tensor is quantized during training: observer and rounding as two modules, or in one kernel.
FAKE_QUANTIZES = ("fake_quantize", "fused_moving_average")


@dataclass(frozen=True, repr=False)
class QuantDefault(Record):
    """How one role of tensor is measured and quantized. ``None``: the observer's own default.

    ``observer`` is one of ``OBSERVERS``, or a class of observers; ``fake_quantize`` (for training) one of
    ``FAKE_QUANTIZES``. The other fields are the keywords of PyTorch's observers.
    Raises ``SpecError`` for a value outside its domain.

    >>> QuantDefault("histogram", dtype=torch.quint8, reduce_range=True)
    QuantDefault('histogram', dtype=torch.quint8, reduce_range=True)
    """

    observer: Annotated[
        str | type[torch.nn.Module],
        WordOrModule(OBSERVERS),
        "How the tensor is measured: a name, or the import path of a class of observers.",
        Phrase("{}"),
    ]
    dtype: Annotated[torch.dtype | None, Phrase("{}")] = None
    qscheme: Annotated[torch.qscheme | None, Phrase("{}")] = None
    quant_min: Annotated[int | None, Phrase("[{}")] = None
    quant_max: Annotated[int | None, Phrase("{}]")] = None
    reduce_range: Annotated[bool | None, Phrase("reduced range", "full range")] = None
    eps: Annotated[float | None, Phrase("scale ≥ {}")] = None
    ch_axis: Annotated[int | None, Phrase("channel axis {}")] = None
    averaging_constant: Annotated[float | None, Phrase("averaging constant {}")] = None
    is_dynamic: Annotated[bool | None, Phrase("dynamic", "not dynamic")] = None
    fake_quantize: Annotated[
        str | None,
        Choice(FAKE_QUANTIZES),
        "How it is quantized during training.",
        Phrase("{}"),
    ] = None
    granularity: Annotated[str | None, SharedBy(), Phrase("{}")] = None
    shown_bare: ClassVar[int] = 1

    def _check(self) -> None:
        if self.eps is not None and not self.eps > 0:
            raise SpecError(f"eps must be positive, got {self.eps!r}", where="eps")
        bounds = (self.quant_min, self.quant_max)
        if bounds.count(None) == 1 or (None not in bounds and bounds[0] >= bounds[1]):  # type: ignore[operator]
            raise SpecError(
                f"quant_min and quant_max are set together, the smaller first; got {bounds}",
                where="quant_min",
            )

    @property
    def options(self) -> dict[str, Any]:
        """The keywords for the observer: every field that is set, without the two names.

        >>> QuantDefault("minmax", dtype=torch.qint8, eps=2**-12).options
        {'dtype': torch.qint8, 'eps': 0.000244140625}
        """
        values = self.to_dict()
        return {k: v for k, v in values.items() if k not in ("observer", "fake_quantize")}

    def __str__(self) -> str:
        """In words: ``histogram, quint8, reduced range``."""
        return ", ".join(phrases(self))


class _Roles(Record):
    """What has a default for some roles of tensors."""

    def roles(self) -> dict[str, QuantDefault]:
        """The roles that have one, by name."""
        values = ((field, value) for field, value in fields_of(self) if field.kind == ROLE)
        return {field.name: value for field, value in values if value is not None}


ROLE = Nested(QuantDefault)


@earlier_names
@dataclass(frozen=True, repr=False)
class DefaultOverride(_Roles):
    """Other defaults for some operators. ``None`` for a role: the backend's own default.

    ``operators`` are single patterns (module classes, functions, method names), in the order in
    which rules for them are registered. A role of training falls back on the backend's role of
    training, not on this override's role of inference. ``activation`` overrides inputs and outputs;
    ``output`` (for training ``qat_output``) outputs alone.

    ``between_float_operators``: the override holds only where all activations that the operator reads are
    float and no quantized operator reads its result, and only for ``quantize`` and ``explain`` without a
    mapping. With it, a target whose static kernels give integers quantizes such operators dynamically.

    >>> DefaultOverride(("reshape",), activation=QuantDefault("reuse_input"))
    DefaultOverride((.reshape(),), activation=QuantDefault('reuse_input'))
    """

    operators: Annotated[tuple[Any, ...], Operators(single=False)]
    activation: QuantDefault | None = None
    weight: QuantDefault | None = None
    qat_activation: QuantDefault | None = None
    qat_weight: QuantDefault | None = None
    between_float_operators: Annotated[
        bool,
        "Only where all activations that they read are float, and so are their readers.",
        Earlier("beside_float"),
    ] = False
    output: QuantDefault | None = None
    qat_output: QuantDefault | None = None
    shown_bare: ClassVar[int] = 1

    def _check(self) -> None:
        if not self.operators:
            raise SpecError(
                "an override names its operators in a tuple, got ()",
                where="operators",
                fix='DefaultOverride(("reshape",), ...)',
            )

    def __str__(self) -> str:
        """The roles in words: ``activation minmax, quint8; weight minmax``."""
        return "; ".join(f"{role} {default}" for role, default in self.roles().items())


@dataclass(frozen=True, repr=False)
class BackendDefaults(_Roles):
    """The defaults of a backend: how each role of tensor is quantized, overrides by operator, and what stays
    float.

    ``activation`` is for inputs and outputs; ``output`` (for training ``qat_output``) overrides outputs.
    If ``qat_activation`` and ``qat_weight`` are None, the backend has no default for training.

    ``leave_float`` lists operators that ``quantize``, ``explain`` and ``prepare_qat_fx`` leave in float
    unless the user's mapping names them; ``prepare_fx`` and the default mappings are PyTorch's and ignore it.
    Raises ``SpecError`` when an operator is overridden twice.

    >>> BackendDefaults(
    ...     activation=QuantDefault("histogram", dtype=torch.quint8),
    ...     weight=QuantDefault("minmax", dtype=torch.qint8),
    ... ).weight
    QuantDefault('minmax', dtype=torch.qint8)
    """

    activation: QuantDefault
    weight: QuantDefault
    qat_activation: QuantDefault | None = None
    qat_weight: QuantDefault | None = None
    overrides: tuple[DefaultOverride, ...] = ()
    leave_float: Annotated[
        tuple[LeaveFloat, ...], "What stays float where the request names no place."
    ] = ()
    output: Annotated[QuantDefault | None, "Of outputs, where it is not as for inputs."] = None
    qat_output: QuantDefault | None = None

    def _check(self) -> None:
        seen: dict[Any, int] = {}
        for index, override in enumerate(self.overrides):
            for operator in override.operators:
                if override.between_float_operators:
                    continue
                if operator in seen:
                    raise SpecError(
                        f"{operator_name(operator)} is overridden twice",
                        where=f"overrides[{index}]",
                        fix=f"remove it here or from overrides[{seen[operator]}]",
                    )
                seen[operator] = index

    def for_qat_version(self, version: int) -> BackendDefaults:
        """The defaults as of a version of ``get_default_qat_qconfig``.

        Version 1 is what is written here; in version 0 the observer and the fake-quantizer are two
        modules. Overrides are the same in both. Raises ``SpecError`` for another version.

        >>> fused = QuantDefault("moving_average_minmax", fake_quantize="fused_moving_average")
        >>> defaults = BackendDefaults(QuantDefault("minmax"), QuantDefault("minmax"), fused, fused)
        >>> defaults.for_qat_version(0).qat_weight.fake_quantize
        'fake_quantize'
        """
        if version not in (0, 1):
            raise SpecError(
                f"no version {version!r} of the defaults", where="version", fix="0 or 1"
            )
        if version == 1 or self.qat_activation is None or self.qat_weight is None:
            return self
        return replace(
            self,
            qat_activation=replace(self.qat_activation, fake_quantize="fake_quantize"),
            qat_weight=replace(self.qat_weight, fake_quantize="fake_quantize"),
        )
