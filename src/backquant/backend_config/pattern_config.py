"""What one pattern may become on a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from backquant.backend_config import legacy
from backquant.backend_config.checks import (
    check_callable,
    check_keys,
    check_module_class,
    renamed,
    within,
)
from backquant.backend_config.conditions import (
    Condition,
    check_names,
    condition_data,
    condition_from,
)
from backquant.backend_config.dtypes import DTypeConfig, as_dtype_config
from backquant.backend_config.graph_pattern import GraphPattern
from backquant.backend_config.internal_setters import InternalSetters
from backquant.backend_config.naming import spelled
from backquant.backend_config.observation import ObservationType, check_observation_type
from backquant.backend_config.pattern import (
    NormalPattern,
    Pattern,
    from_reversed,
    normal_form,
    to_forward,
    to_reversed,
)
from backquant.backend_config.ports import Port, checked_ports
from backquant.errors import SpecError

#: Dict key → attribute, in the order of ``to_dict``.
_OPTIONAL_FIELDS = {
    "pattern": "pattern",
    "root_module": "root_module",
    "qat_module": "qat_module",
    "reference_quantized_module_for_root": "reference_quantized_module",
    "fused_module": "fused_module",
    "fuser_method": "fuser_method",
    "root_node_getter": "_root_node_getter",
    "extra_inputs_getter": "_extra_inputs_getter",
    "num_tensor_args_to_observation_type": "_num_tensor_args_to_observation_type",
    "input_type_to_index": "_input_type_to_index",
    "input_output_observed": "_input_output_observed",
    "overwrite_output_fake_quantize": "_overwrite_output_fake_quantize",
    "overwrite_output_observer": "_overwrite_output_observer",
    "pattern_complex_format": "_pattern_complex_format",
    "ports": "ports",
    "where": "where",
}
_KEYS = ("observation_type", "dtype_configs", *_OPTIONAL_FIELDS)
_PATTERN_KEYS = ("pattern", "pattern_complex_format")


class BackendPatternConfig(InternalSetters):
    """How one pattern is quantized: dtypes, observation, fusion, QAT and reference modules.

    Invariants

    1. At most one of ``pattern`` (forward form) and ``_pattern_complex_format`` (reversed) is set.
    2. ``observation_type`` is ``INPUT_OUTPUT_NOT_OBSERVED`` whenever ``_input_output_observed``
       (a field of PyTorch 1.13) is False.

    Two are equal when their patterns have one normal form and all fields are equal; with a fuser,
    the patterns must also be spelled in the same form, since it orders the fuser's arguments; the
    names of a ``GraphPattern`` count.

    >>> dtypes = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
    >>> linear = BackendPatternConfig(torch.nn.Linear).add_dtype_config(dtypes)
    >>> linear.set_root_module(torch.nn.Linear)
    BackendPatternConfig(torch.nn.Linear, dtype_configs=[DTypeConfig(input_dtype=torch.quint8, \
output_dtype=torch.quint8, weight_dtype=torch.qint8, bias_dtype=torch.float32)], \
root_module=torch.nn.Linear)
    """

    __hash__ = None  # type: ignore[assignment]  # mutable

    _known_normal: tuple[Pattern, NormalPattern] | None = None  # of which pattern

    def __init__(self, pattern: Pattern | None = None) -> None:
        super().__init__()
        self._observation_type = ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
        self.dtype_configs: list[DTypeConfig] = []
        self.root_module: type[torch.nn.Module] | None = None
        self.qat_module: type[torch.nn.Module] | None = None
        self.reference_quantized_module: type[torch.nn.Module] | None = None
        self.fused_module: type[torch.nn.Module] | None = None
        self.fuser_method: Callable[..., Any] | None = None
        self.ports: dict[str, Port] = {}
        self.where: Condition | None = None
        self._pattern_complex_format: Pattern | None = None
        if pattern is not None:
            self.set_pattern(pattern)

    # -- the pattern -----------------------------------------------------------------------------

    def set_pattern(self, pattern: Pattern) -> BackendPatternConfig:
        """Set the pattern: one operator, a tuple of two or more in forward order, or a graph.

        An operator is a subclass of ``nn.Module``, a function, or a method's name. What no tuple can
        express is a ``GraphPattern``.
        Raises ``SpecError`` (a ``ValueError``) when the other format is set, or it is malformed.

        >>> BackendPatternConfig().set_pattern((torch.nn.Conv2d, torch.nn.ReLU)).normal_pattern
        NormalPattern(torch.nn.ReLU(torch.nn.Conv2d))
        """
        if pattern is not None:
            if self._pattern_complex_format is not None:
                raise _both_forms()
            normal = normal_form(pattern)
            if pattern is normal and normal.is_sequential:
                pattern = to_forward(normal)
            self.ports = checked_ports(pattern, self.ports) if self.ports else {}
        self.pattern = pattern
        if pattern is not None:
            self._check_names()
        return self

    def _set_pattern_complex_format(self, pattern: Pattern) -> BackendPatternConfig:
        """Set the pattern as reversed nested tuple; ``SpecError`` when ``pattern`` is set."""
        if pattern is not None:
            if self.pattern is not None:
                raise _both_forms()
            if isinstance(pattern, GraphPattern):
                raise SpecError(
                    "a GraphPattern is no nested tuple",
                    where="pattern_complex_format",
                    fix="BackendPatternConfig(GraphPattern(...))",
                )
            normal = from_reversed(pattern)
            pattern = to_reversed(normal) if pattern is normal else pattern
        self._pattern_complex_format = pattern
        return self

    @property
    def normal_pattern(self) -> NormalPattern:
        """The pattern in normal form. Raises ``SpecError`` when none is set.

        >>> BackendPatternConfig(torch.add).normal_pattern.anchor
        PatternNode(torch.add, inputs=None, kind='function')
        """
        nested = self._pattern_complex_format
        source = self.pattern if nested is None else nested
        if source is None:
            raise SpecError(
                "a BackendPatternConfig without a pattern",
                where="pattern",
                fix="BackendPatternConfig(torch.nn.Linear)",
            )
        known = self._known_normal
        if known is None or known[0] is not source:
            known = source, normal_form(source) if nested is None else from_reversed(source)
            self._known_normal = known
        return known[1]

    # -- observation and dtypes ------------------------------------------------------------------

    @property
    def observation_type(self) -> ObservationType:
        """How inputs and outputs are observed; see ``ObservationType``."""
        if self._input_output_observed is False:
            return ObservationType.INPUT_OUTPUT_NOT_OBSERVED
        return self._observation_type

    @observation_type.setter
    def observation_type(self, value: ObservationType) -> None:
        check_observation_type(value, "observation_type")
        self._observation_type = value

    def set_observation_type(self, observation_type: ObservationType) -> BackendPatternConfig:
        """Set how inputs and outputs are observed; default: with observers of their own.

        >>> shares = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
        >>> BackendPatternConfig(torch.cat).set_observation_type(shares).observation_type
        ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
        """
        self.observation_type = observation_type
        return self

    def set_ports(self, ports: Mapping[str, Port | str]) -> BackendPatternConfig:
        """Set how the inputs and the output of a ``GraphPattern`` are observed, by name.

        A role, ``"activation"`` (the default), ``"weight"``, ``"bias"`` or ``"float"``, or a ``Port``,
        which may share its observer with another. Raises ``SpecError`` for a port that is not there.

        >>> from backquant.backend_config import GraphPattern
        >>> scaled = GraphPattern(["x", "by"], {"out": (torch.mul, "x", "by")})
        >>> BackendPatternConfig(scaled).set_ports({"by": "float"}).ports
        {'by': Port('float')}
        """
        self.ports = checked_ports(self.pattern, ports) if ports else {}
        return self

    def add_dtype_config(self, dtype_config: DTypeConfig) -> BackendPatternConfig:
        """Append one admitted combination of dtypes; earlier ones are tried first.

        >>> len(BackendPatternConfig(torch.add).add_dtype_config(DTypeConfig()).dtype_configs)
        1
        """
        return self.set_dtype_configs([*self.dtype_configs, dtype_config])

    def set_dtype_configs(self, dtype_configs: Iterable[DTypeConfig]) -> BackendPatternConfig:
        """Replace all admitted combinations of dtypes. The iterable is copied.

        >>> BackendPatternConfig(torch.add).set_dtype_configs([DTypeConfig()]).dtype_configs
        [DTypeConfig()]
        """
        configs = []
        for index, dtype_config in enumerate(dtype_configs):
            with within(f"dtype_configs[{index}]"):
                configs.append(as_dtype_config(dtype_config))
                self._check_condition(configs[-1].where)
        self.dtype_configs = configs
        return self

    # -- conditions ------------------------------------------------------------------------------

    def set_where(self, where: Condition | Mapping[str, Any] | None) -> BackendPatternConfig:
        """Set conditions on the operator's sizes and arguments, as a mapping; ``None``: no condition.

        An operator that violates a condition stays float, with the reason. ``DTypeConfig(where=…)``
        is the same for one combination of dtypes. ``docs/spec-files.md`` lists what can be compared.

        Raises ``SpecError`` for an unknown quantity or comparison.

        >>> conv = BackendPatternConfig(torch.nn.Conv2d)
        >>> print(conv.set_where({"kernel_size": {"max": 7}, "stride": [1, 2]}).where)
        kernel_size ≤ 7, stride one of 1, 2
        """
        with within("where"):
            condition = condition_from(where)
            self._check_condition(condition)
        self.where = condition
        return self

    def _check_condition(self, condition: Condition | None) -> None:
        if condition is not None and (self.pattern, self._pattern_complex_format) != (None, None):
            check_names(condition, self)

    # -- modules ---------------------------------------------------------------------------------

    def set_root_module(self, root_module: type[torch.nn.Module] | None) -> BackendPatternConfig:
        """Set the float module that conversion swaps for the reference module of this entry.

        >>> BackendPatternConfig(torch.nn.Linear).set_root_module(torch.nn.Linear).root_module
        <class 'torch.nn.modules.linear.Linear'>
        """
        self.root_module = check_module_class(root_module, "root_module")
        return self

    def set_qat_module(self, qat_module: type[torch.nn.Module] | None) -> BackendPatternConfig:
        """Set the module that quantization-aware training uses for this pattern.

        >>> BackendPatternConfig(torch.nn.Linear).set_qat_module(None).qat_module is None
        True
        """
        self.qat_module = check_module_class(qat_module, "qat_module")
        return self

    def set_reference_quantized_module(
        self, reference_quantized_module: type[torch.nn.Module] | None
    ) -> BackendPatternConfig:
        """Set the reference quantized module of this pattern's root module.

        >>> linear = BackendPatternConfig(torch.nn.Linear)
        >>> linear.set_reference_quantized_module(None).reference_quantized_module is None
        True
        """
        self.reference_quantized_module = check_module_class(
            reference_quantized_module, "reference_quantized_module"
        )
        return self

    def set_fused_module(self, fused_module: type[torch.nn.Module] | None) -> BackendPatternConfig:
        """Set the module that this pattern is fused into.

        >>> from backquant.nn.intrinsic import LinearReLU
        >>> entry = BackendPatternConfig((torch.nn.Linear, torch.nn.ReLU)).set_fused_module(LinearReLU)
        >>> entry.fused_module.__name__
        'LinearReLU'
        """
        self.fused_module = check_module_class(fused_module, "fused_module")
        return self

    def set_fuser_method(self, fuser_method: Callable[..., Any] | None) -> BackendPatternConfig:
        """Set ``f(is_qat, *modules) -> module``; the modules stand in the order of the pattern.

        For ``(torch.nn.Linear, torch.nn.ReLU)``: ``f(is_qat, linear, relu)``. For a pattern given
        in the reversed form ``(relu, (bn, conv))``: ``f(is_qat, relu, (bn, conv))``.

        >>> def fuse(is_qat, linear, relu):
        ...     return torch.nn.Sequential(linear, relu)
        >>> entry = BackendPatternConfig((torch.nn.Linear, torch.nn.ReLU)).set_fuser_method(fuse)
        >>> entry.fuser_method(False, torch.nn.Linear(2, 2), torch.nn.ReLU())[1]
        ReLU()
        """
        self.fuser_method = check_callable(fuser_method, "fuser_method")
        return self

    # -- dicts -----------------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls, backend_pattern_config_dict: Mapping[str, Any], version: str | None = None
    ) -> BackendPatternConfig:
        """Build from a dict with the keys of ``to_dict``, all optional.

        ``reference_quantized_module_for_root`` may be written ``reference_quantized_module``;
        ``dtype_configs`` is a list of ``DTypeConfig`` or of their dicts. ``version="1.13"`` reads
        the older form: reversed patterns, fusers that take their modules in reversed order.
        Raises ``SpecError`` (a ``ValueError``) with the place for an unknown key or a wrong value.

        >>> BackendPatternConfig.from_dict({"pattern": torch.add}).pattern is torch.add
        True
        """
        short, full = "reference_quantized_module", "reference_quantized_module_for_root"
        given = renamed(backend_pattern_config_dict, short, full)
        check_keys(given, _KEYS, "BackendPatternConfig")
        given = legacy.upgrade(given, version)
        config = cls()
        if "observation_type" in given:
            config.set_observation_type(given["observation_type"])
        config.set_dtype_configs(given.get("dtype_configs") or ())
        for key, attribute in _OPTIONAL_FIELDS.items():
            if given.get(key) is not None:
                prefix, name = (
                    ("_set_", attribute[1:]) if attribute[0] == "_" else ("set_", attribute)
                )
                getattr(config, prefix + name)(given[key])
        return config

    def to_dict(self) -> dict[str, Any]:
        """``observation_type``, ``dtype_configs`` (as dicts), and every other field that is set.

        >>> sorted(BackendPatternConfig(torch.add).to_dict())
        ['dtype_configs', 'observation_type', 'pattern']
        """
        values: dict[str, Any] = {
            "observation_type": self.observation_type,
            "dtype_configs": [config.to_dict() for config in self.dtype_configs],
        }
        for key, attribute in _OPTIONAL_FIELDS.items():
            value = getattr(self, attribute)
            if key == "where" and value is not None:
                values[key] = condition_data(value)
            elif value is not None and value != {}:
                values[key] = dict(value) if isinstance(value, dict) else value
        return values

    # -- comparison and display ------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BackendPatternConfig):
            return NotImplemented
        return self._comparable() == other._comparable()

    def _comparable(self) -> tuple[Any, ...]:
        has_pattern = self.pattern is not None or self._pattern_complex_format is not None
        reversed_arguments = self.fuser_method is not None and self.pattern is None
        return (
            self.normal_pattern if has_pattern else None,
            self.pattern if isinstance(self.pattern, GraphPattern) else None,
            reversed_arguments,
            self.observation_type,
            self.dtype_configs,
            *(getattr(self, a) for k, a in _OPTIONAL_FIELDS.items() if k not in _PATTERN_KEYS),
        )

    def __repr__(self) -> str:
        values = self.to_dict()
        parts = []
        if self.pattern is not None:
            parts.append(spelled(values.pop("pattern")))
        if values["observation_type"] is ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT:
            del values["observation_type"]
        values["dtype_configs"] = self.dtype_configs
        for key, value in values.items():
            if value == [] or key == "input_output_observed":
                continue
            text = spelled(value) if callable(value) or key in _PATTERN_KEYS else repr(value)
            parts.append(f"{key}={text}")
        return f"BackendPatternConfig({', '.join(parts)})"


def _both_forms() -> SpecError:
    return SpecError(
        "only one of 'pattern' and 'pattern_complex_format' can be set",
        where="pattern",
        fix="keep 'pattern' for a sequence, 'pattern_complex_format' for a nested tuple",
    )
