"""What a backend quantizes with when the user asks for nothing in particular, as data.

Nothing here measures anything: the qconfig room turns these records into observers and fake
quantizes. Operators with fixed quantization parameters are not listed; they follow from the entries
whose constraints carry ``scale_exact_match`` and ``zero_point_exact_match``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from backquant.backend_config.checks import (
    check_bool,
    check_choice,
    check_keys,
    check_module_class,
    check_number,
    within,
)
from backquant.backend_config.earlier_names import earlier_names
from backquant.backend_config.leave_float import LeaveFloat, given_rules, rules_from
from backquant.backend_config.naming import operator_name
from backquant.backend_config.pattern import normal_form
from backquant.dtypes import Granularity
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

#: What defaults and overrides say how to quantize.
DEFAULT_ROLES = ("activation", "weight", "output", "qat_activation", "qat_weight", "qat_output")
EARLIER_NAMES = {"beside_float": "between_float_operators"}
_MORE = ("overrides", "leave_float")


@dataclass(frozen=True, repr=False)
class QuantDefault:
    """How one role of tensor is measured and quantized. ``None``: the observer's own default.

    ``observer`` is one of ``OBSERVERS``, or a class of observers; ``fake_quantize`` (for training) one of
    ``FAKE_QUANTIZES``. The other fields are the keywords of PyTorch's observers.
    Raises ``SpecError`` for a value outside its domain.

    >>> QuantDefault("histogram", dtype=torch.quint8, reduce_range=True)
    QuantDefault('histogram', dtype=torch.quint8, reduce_range=True)
    """

    observer: str | type[torch.nn.Module]
    dtype: torch.dtype | None = None
    qscheme: torch.qscheme | None = None
    quant_min: int | None = None
    quant_max: int | None = None
    reduce_range: bool | None = None
    eps: float | None = None
    ch_axis: int | None = None
    averaging_constant: float | None = None
    is_dynamic: bool | None = None
    fake_quantize: str | None = None
    granularity: str | None = None

    def __post_init__(self) -> None:
        if self.observer is None:
            raise SpecError("an observer must be named", where="observer", fix=str(OBSERVERS))
        if isinstance(self.observer, type):
            check_module_class(self.observer, "observer")
        else:
            check_choice(self.observer, "observer", OBSERVERS)
        if self.granularity is not None:
            object.__setattr__(self, "granularity", str(Granularity.parse(self.granularity)))
        check_choice(self.fake_quantize, "fake_quantize", FAKE_QUANTIZES)
        for name, kind in (("dtype", torch.dtype), ("qscheme", torch.qscheme)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise SpecError(f"{name} must be a torch.{name}, got {value!r}", where=name)
        for name in ("quant_min", "quant_max", "ch_axis"):
            check_number(getattr(self, name), name, (int,))
        for name in ("eps", "averaging_constant"):
            check_number(getattr(self, name), name)
        check_bool(self.reduce_range, "reduce_range")
        check_bool(self.is_dynamic, "is_dynamic")
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

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set; values are strings, numbers, ``torch.dtype``, ``torch.qscheme``.

        >>> QuantDefault("placeholder").to_dict()
        {'observer': 'placeholder'}
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QuantDefault:
        """The inverse of ``to_dict``. Raises ``SpecError`` for an unknown key.

        >>> QuantDefault.from_dict({"observer": "placeholder"})
        QuantDefault('placeholder')
        """
        check_keys(values, [field.name for field in fields(cls)], "QuantDefault")
        return cls(**{"observer": None, **values})

    def __repr__(self) -> str:
        values = self.to_dict()
        observer = values.pop("observer")
        first = repr(observer) if isinstance(observer, str) else operator_name(observer)
        parts = [first, *(f"{k}={v!r}" for k, v in values.items())]
        return f"QuantDefault({', '.join(parts)})"


@earlier_names(EARLIER_NAMES)
@dataclass(frozen=True, repr=False)
class DefaultOverride:
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

    operators: tuple[Any, ...]
    activation: QuantDefault | None = None
    weight: QuantDefault | None = None
    qat_activation: QuantDefault | None = None
    qat_weight: QuantDefault | None = None
    between_float_operators: bool = False
    output: QuantDefault | None = None
    qat_output: QuantDefault | None = None

    def __post_init__(self) -> None:
        check_bool(self.between_float_operators, "between_float_operators")
        given: Any = self.operators
        if not isinstance(given, (tuple, list)) or not given:
            raise SpecError(
                f"an override names its operators in a tuple, got {given!r}",
                where="operators",
                fix='DefaultOverride(("reshape",), ...)',
            )
        object.__setattr__(self, "operators", tuple(given))
        for index, operator in enumerate(self.operators):
            with within(f"operators[{index}]"):
                normal_form(operator)
        for role in DEFAULT_ROLES:
            _check_role(getattr(self, role), role)

    def to_dict(self) -> dict[str, Any]:
        """``operators`` as a list, and the roles that are set, as dicts.

        >>> DefaultOverride(("reshape",), QuantDefault("reuse_input")).to_dict()
        {'operators': ['reshape'], 'activation': {'observer': 'reuse_input'}}
        """
        where = {"between_float_operators": True} if self.between_float_operators else {}
        return {"operators": list(self.operators), **_roles_to_dict(self), **where}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DefaultOverride:
        """The inverse of ``to_dict``. Raises ``SpecError`` for an unknown key.

        >>> DefaultOverride.from_dict({"operators": ["reshape"]}).operators
        ('reshape',)
        """
        names = ("between_float_operators", *EARLIER_NAMES)
        check_keys(values, ("operators", *DEFAULT_ROLES, *names), "DefaultOverride")
        where: dict[str, Any] = {name: bool(values[name]) for name in names if name in values}
        return cls(values.get("operators", ()), **_roles_from_dict(values), **where)

    def __repr__(self) -> str:
        names = ", ".join(map(operator_name, self.operators))
        comma = "," if len(self.operators) == 1 else ""
        where = ["between_float_operators=True"] if self.between_float_operators else []
        return f"DefaultOverride({', '.join([f'({names}{comma})', *_roles_repr(self), *where])})"


@dataclass(frozen=True, repr=False)
class BackendDefaults:
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
    leave_float: tuple[LeaveFloat, ...] = ()
    output: QuantDefault | None = None
    qat_output: QuantDefault | None = None

    def __post_init__(self) -> None:
        for role in DEFAULT_ROLES:
            _check_role(getattr(self, role), role)
        object.__setattr__(self, "leave_float", given_rules(self.leave_float))
        for role in ("activation", "weight"):
            if getattr(self, role) is None:
                raise SpecError(f"the defaults of a backend name its {role}", where=role)
        object.__setattr__(self, "overrides", tuple(self.overrides))
        seen: dict[Any, int] = {}
        for index, override in enumerate(self.overrides):
            place = f"overrides[{index}]"
            if not isinstance(override, DefaultOverride):
                raise SpecError(f"expected a DefaultOverride, got {override!r}", where=place)
            for operator in override.operators:
                if override.between_float_operators:
                    continue
                if operator in seen:
                    raise SpecError(
                        f"{operator_name(operator)} is overridden twice",
                        where=place,
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

    def to_dict(self) -> dict[str, Any]:
        """The roles that are set, as dicts, and ``overrides`` as a list of dicts.

        >>> BackendDefaults(QuantDefault("minmax"), QuantDefault("minmax")).to_dict()
        {'activation': {'observer': 'minmax'}, 'weight': {'observer': 'minmax'}}
        """
        values: dict[str, Any] = _roles_to_dict(self)
        if self.overrides:
            values["overrides"] = [override.to_dict() for override in self.overrides]
        if self.leave_float:
            values["leave_float"] = [rule.to_dict() for rule in self.leave_float]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BackendDefaults:
        """The inverse of ``to_dict``. Raises ``SpecError`` with the place for an unknown key.

        >>> minmax = {"observer": "minmax"}
        >>> BackendDefaults.from_dict({"activation": minmax, "weight": minmax})
        BackendDefaults(activation=QuantDefault('minmax'), weight=QuantDefault('minmax'))
        """
        check_keys(values, (*DEFAULT_ROLES, *_MORE), "BackendDefaults")
        overrides = []
        for index, item in enumerate(values.get("overrides") or ()):
            with within(f"overrides[{index}]"):
                is_dict = isinstance(item, Mapping)
                overrides.append(DefaultOverride.from_dict(item) if is_dict else item)
        roles = {"activation": None, "weight": None, **_roles_from_dict(values)}
        rules = rules_from(values.get("leave_float"))
        return cls(**roles, overrides=tuple(overrides), leave_float=rules)

    def __repr__(self) -> str:
        parts = _roles_repr(self)
        if self.overrides:
            parts.append(f"overrides={self.overrides!r}")
        if self.leave_float:
            parts.append(f"leave_float={self.leave_float!r}")
        return f"BackendDefaults({', '.join(parts)})"


def _check_role(value: Any, role: str) -> None:
    if value is not None and not isinstance(value, QuantDefault):
        raise SpecError(f"{role} must be a QuantDefault, got {value!r}", where=role)


def _roles_to_dict(record: DefaultOverride | BackendDefaults) -> dict[str, Any]:
    roles = {role: getattr(record, role) for role in DEFAULT_ROLES}
    return {role: value.to_dict() for role, value in roles.items() if value is not None}


def _roles_from_dict(values: Mapping[str, Any]) -> dict[str, Any]:
    roles: dict[str, Any] = {}
    for role in DEFAULT_ROLES:
        value = values.get(role)
        if isinstance(value, Mapping):
            with within(role):
                value = QuantDefault.from_dict(value)
        if value is not None:
            roles[role] = value
    return roles


def _roles_repr(record: DefaultOverride | BackendDefaults) -> list[str]:
    roles = ((role, getattr(record, role)) for role in DEFAULT_ROLES)
    return [f"{role}={value!r}" for role, value in roles if value is not None]
