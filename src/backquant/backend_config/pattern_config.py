"""What one pattern may become on a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Annotated, Any

import torch

from backquant.backend_config.checks import check_keys, renamed, within
from backquant.backend_config.conditions import Condition, check_names, condition_from
from backquant.backend_config.declared import OURS, Key, declared, set_fields
from backquant.backend_config.dtypes import DTypeConfig
from backquant.backend_config.fusers import in_forward_order
from backquant.backend_config.graph_pattern import GraphPattern, check_getters
from backquant.backend_config.kinds import (
    ByCount,
    Function,
    Getter,
    Listed,
    ModuleClass,
    Observation,
    OnePattern,
    Positions,
    Where,
)
from backquant.backend_config.naming import spelled
from backquant.backend_config.observation import ObservationType
from backquant.backend_config.pattern import (
    NormalPattern,
    Pattern,
    from_reversed,
    normal_form,
    to_forward,
    to_reversed,
)
from backquant.backend_config.ports import Port, Ports, checked_ports
from backquant.errors import SpecError

# Dicts in the form of PyTorch 1.13, read as the current form.
#
# There a tuple pattern is reversed and nested, and a fuser takes its modules in that order. A
# reversed tuple cannot be told from a forward one, so the caller names the version.

_VERSIONS = (None, "1.13")


def upgrade(entry: Mapping[str, Any], version: str | None) -> dict[str, Any]:
    """The dict of one entry in the current form.

    With ``version="1.13"``: (1) a reversed sequence becomes a forward one and its fuser is called
    in forward order; (2) any other tuple becomes ``pattern_complex_format``, whose fuser keeps its
    order. The fields that only 1.13 has are those of ``BackendPatternConfig``, where they act.
    Raises ``SpecError`` for an unknown version, or when a 1.13 entry has no pattern.

    >>> upgrade({"pattern": ("relu", "conv")}, "1.13")
    {'pattern': ('conv', 'relu')}
    """
    if version not in _VERSIONS:
        raise SpecError(
            f"no dicts of version {version!r} are known",
            where="version",
            fix='version="1.13" for reversed patterns, no version for the current form',
        )
    current = dict(entry)
    if version is None:
        return current
    if current.get("pattern") is None:
        if current.get("pattern_complex_format") is None:
            raise SpecError("an entry of version 1.13 must contain 'pattern'", where="pattern")
        return current
    pattern = current["pattern"]
    normal = from_reversed(pattern)
    if isinstance(pattern, tuple) and not normal.is_sequential:  # (2)
        del current["pattern"]
        current["pattern_complex_format"] = pattern
    else:  # (1)
        current["pattern"] = to_forward(normal)
        if normal.size > 1 and current.get("fuser_method") is not None:
            current["fuser_method"] = in_forward_order(current["fuser_method"])
    return current


_Module = type[torch.nn.Module]
_COMPARED_OTHERWISE = ("pattern", "_pattern_complex_format", "_observation_type")


def _setter(name: str, says: str) -> Callable[[BackendPatternConfig, Any], BackendPatternConfig]:
    """A setter of a field that its kind alone checks."""

    def set_value(self: BackendPatternConfig, value: Any) -> BackendPatternConfig:
        return self._store(name, value)

    set_value.__name__, set_value.__doc__ = f"_set_{name}", says
    return set_value


class BackendPatternConfig:
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

    _observation_type: Annotated[ObservationType, Observation()]
    dtype_configs: Annotated[list[DTypeConfig], Listed(DTypeConfig)]
    pattern: Annotated[Pattern | None, OnePattern()]
    root_module: Annotated[_Module | None, ModuleClass()]
    qat_module: Annotated[_Module | None, ModuleClass()]
    reference_quantized_module: Annotated[
        _Module | None, ModuleClass(), Key("reference_quantized_module_for_root")
    ]
    fused_module: Annotated[_Module | None, ModuleClass()]
    fuser_method: Annotated[Callable[..., Any] | None, Function()]
    _root_node_getter: Annotated[
        Callable[..., Any] | None,
        Getter(several=False),
        "The name of a node of a graph pattern, or a function's import path.",
    ]
    _extra_inputs_getter: Annotated[
        Callable[..., Any] | None,
        Getter(several=True),
        "Names of inputs of a graph pattern, or a function's import path.",
    ]
    _num_tensor_args_to_observation_type: Annotated[dict[int, ObservationType], ByCount()]
    _input_type_to_index: Annotated[dict[str, int], Positions()]
    _input_output_observed: bool | None
    _overwrite_output_fake_quantize: Annotated[Callable[..., Any] | None, OURS, Function()]
    _overwrite_output_observer: Annotated[Callable[..., Any] | None, OURS, Function()]
    _pattern_complex_format: Annotated[Pattern | None, OnePattern()]
    ports: Annotated[
        dict[str, Port],
        OURS,
        Ports(),
        "How the inputs and the output of a graph pattern are observed, by name.",
    ]
    where: Annotated[
        Condition | None,
        OURS,
        Where(),
        "The uses of the pattern that the backend takes; all without it.",
    ]

    def __init__(self, pattern: Pattern | None = None) -> None:
        self.__dict__.update(_DEFAULTS)
        self.__dict__.update({name: container() for name, container in _CONTAINERS.items()})
        self._known_normal: tuple[Pattern, NormalPattern] | None = None  # of which pattern
        if pattern is not None:
            self.set_pattern(pattern)

    def copy(self) -> BackendPatternConfig:
        """The same with containers and dtype configs of its own.

        >>> BackendPatternConfig(torch.add).copy()
        BackendPatternConfig(torch.add)
        """
        new = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict):
                setattr(new, name, dict(value))
        new.dtype_configs = [config.copy() for config in self.dtype_configs]
        return new

    def _store(self, name: str, value: Any) -> BackendPatternConfig:
        """Set a field, checked by its kind alone; None: to its default."""
        field = _FIELDS[name]
        unset = value is None
        setattr(
            self, field.attribute, copy(field.default) if unset else field.kind.check(value, name)
        )
        return self

    def set_field(self, name: str, value: Any) -> BackendPatternConfig:
        """Set a field by its name, with its setter; None: to its default.

        >>> BackendPatternConfig(torch.add).set_field("input_type_to_index", {"weight": 1})
        BackendPatternConfig(torch.add, input_type_to_index={'weight': 1})
        """
        prefix = "_set_" if hasattr(self, f"_set_{name}") else "set_"
        setter: Callable[[Any], BackendPatternConfig] = getattr(self, prefix + name)
        return setter(value)

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
        self._store("observation_type", value)

    def set_observation_type(self, observation_type: ObservationType) -> BackendPatternConfig:
        """Set how inputs and outputs are observed; default: with observers of their own.

        >>> shares = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
        >>> BackendPatternConfig(torch.cat).set_observation_type(shares).observation_type
        ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
        """
        return self._store("observation_type", observation_type)

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
        configs = _FIELDS["dtype_configs"].kind.check(dtype_configs, "dtype_configs")
        for index, dtype_config in enumerate(configs):
            if dtype_config.where is not None:
                with within(f"dtype_configs[{index}]"):
                    self._check_condition(dtype_config.where)
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
        return self._store("root_module", root_module)

    def set_qat_module(self, qat_module: type[torch.nn.Module] | None) -> BackendPatternConfig:
        """Set the module that quantization-aware training uses for this pattern.

        >>> BackendPatternConfig(torch.nn.Linear).set_qat_module(None).qat_module is None
        True
        """
        return self._store("qat_module", qat_module)

    def set_reference_quantized_module(
        self, reference_quantized_module: type[torch.nn.Module] | None
    ) -> BackendPatternConfig:
        """Set the reference quantized module of this pattern's root module.

        >>> linear = BackendPatternConfig(torch.nn.Linear)
        >>> linear.set_reference_quantized_module(None).reference_quantized_module is None
        True
        """
        return self._store("reference_quantized_module", reference_quantized_module)

    def set_fused_module(self, fused_module: type[torch.nn.Module] | None) -> BackendPatternConfig:
        """Set the module that this pattern is fused into.

        >>> from backquant.nn.intrinsic import LinearReLU
        >>> entry = BackendPatternConfig((torch.nn.Linear, torch.nn.ReLU)).set_fused_module(LinearReLU)
        >>> entry.fused_module.__name__
        'LinearReLU'
        """
        return self._store("fused_module", fused_module)

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
        return self._store("fuser_method", fuser_method)

    # -- what PyTorch marks as internal ----------------------------------------------------------

    def _check_names(self) -> None:
        """Raise ``SpecError`` when a getter chooses by a name that the pattern has not."""
        root, extra = self._root_node_getter, self._extra_inputs_getter
        if root is not None or extra is not None:
            given = [("root_node_getter", root), ("extra_inputs_getter", extra)]
            check_getters(self.pattern, given)

    def _set_root_node_getter(
        self, root_node_getter: Callable[..., Any] | str | None
    ) -> BackendPatternConfig:
        """``f(node pattern) -> node``: the node that carries the fused module.

        For a ``GraphPattern``: its name, or ``f({name: node}) -> node``.
        """
        self._store("root_node_getter", root_node_getter)._check_names()
        return self

    def _set_extra_inputs_getter(
        self, extra_inputs_getter: Callable[..., Any] | Sequence[str] | None
    ) -> BackendPatternConfig:
        """``f(node pattern) -> list of nodes``: inputs of the fused module beyond the root's.

        For a ``GraphPattern``: their names, or ``f({name: node}) -> list of nodes``.
        """
        self._store("extra_inputs_getter", extra_inputs_getter)._check_names()
        return self

    _set_num_tensor_args_to_observation_type = _setter(
        "num_tensor_args_to_observation_type",
        "The observation type by number of tensor arguments; it overrides the entry's own.",
    )
    _set_input_type_to_index = _setter(
        "input_type_to_index",
        'Positions of ``"weight"``, ``"bias"`` or ``"input"`` among the arguments of the call.',
    )
    _set_input_output_observed = _setter(
        "input_output_observed",
        "PyTorch 1.13; False makes ``observation_type`` ``INPUT_OUTPUT_NOT_OBSERVED``.",
    )
    _set_overwrite_output_fake_quantize = _setter(
        "overwrite_output_fake_quantize",
        "PyTorch 1.13; a factory whose product observes the output during training.",
    )
    _set_overwrite_output_observer = _setter(
        "overwrite_output_observer",
        "PyTorch 1.13; a factory whose product observes the output instead of the QConfig's.",
    )

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
        check_keys(given, (field.key for field in _FIELDS.values()), "BackendPatternConfig")
        given = upgrade(given, version)
        config = cls()
        for field in _FIELDS.values():
            if given.get(field.key) is not None:
                config.set_field(field.name, given[field.key])
        return config

    def to_dict(self) -> dict[str, Any]:
        """``observation_type``, ``dtype_configs`` (as dicts), and every other field that is set.

        >>> sorted(BackendPatternConfig(torch.add).to_dict())
        ['dtype_configs', 'observation_type', 'pattern']
        """
        values: dict[str, Any] = {"observation_type": self.observation_type, "dtype_configs": []}
        values |= {field.key: field.kind.to_data(value) for field, value in set_fields(self)}
        return {**values, "observation_type": self.observation_type}

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
            *(
                getattr(self, f.attribute)
                for f in _FIELDS.values()
                if f.attribute not in _COMPARED_OTHERWISE
            ),
        )

    def __repr__(self) -> str:
        texts = [] if self.pattern is None else [spelled(self.pattern)]
        for field, value in set_fields(self):
            if field.name not in ("pattern", "input_output_observed"):
                texts.append(f"{field.key}={field.kind.source(value)}")
        return f"BackendPatternConfig({', '.join(texts)})"


_FIELDS = {field.name: field for field in declared(BackendPatternConfig)}
_DEFAULTS = {field.attribute: field.default for field in _FIELDS.values()}
_CONTAINERS = {n: type(value) for n, value in _DEFAULTS.items() if isinstance(value, (list, dict))}


def _both_forms() -> SpecError:
    return SpecError(
        "only one of 'pattern' and 'pattern_complex_format' can be set",
        where="pattern",
        fix="keep 'pattern' for a sequence, 'pattern_complex_format' for a nested tuple",
    )
