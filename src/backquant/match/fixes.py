"""The QConfig nearest to the requested one that the backend would admit, as data that prints as code.

The code uses names of ``backquant`` and ``torch`` and the variable ``qconfig_mapping``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx

from backquant import observe
from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
)
from backquant.backend_config.checks import short_text
from backquant.backend_config.naming import operator_name
from backquant.dtypes import Granularity, is_scaled_float, qdtype
from backquant.errors import BackquantError, did_you_mean, literal
from backquant.graph import Scope
from backquant.identifiers import label
from backquant.match.conditions import unmet
from backquant.match.constraints import check_tensor, divides
from backquant.match.plan import Decision, Fusion, RuleKind, RuleRef, TensorRequest
from backquant.match.refusal import Refusal
from backquant.match.rules import Hit, QConfigReader, RuleTable
from backquant.match.verdict import Judge, QConfigRequest, Roles, reads_sums
from backquant.operators.facts import UseFacts
from backquant.qconfig import QConfig, get_default_qconfig

# Observers for which the fix keeps the class and changes dtype and range.
_PER_TENSOR = ("MinMaxObserver", "MovingAverageMinMaxObserver", "HistogramObserver")
_PER_CHANNEL = ("PerChannelMinMaxObserver", "MovingAveragePerChannelMinMaxObserver")

# Constraints that are met by the choice of qscheme or observer, and those that need fixed qparams.
_OF_THE_SCHEME = (
    "scale_exact_match",
    "zero_point_exact_match",
    "symmetric",
    "granularity",
    "ch_axis",
)
_FIXED = ("scale_exact_match",)

# Dtypes of embedding weights, whose rows have float zero points (float_qparams).
_ROW_WISE = (torch.quint8, torch.quint4x2)
_MANY, _USUAL_GROUP = torch.per_channel_symmetric, 128


def mapping_call(node: fx.Node, path: str, hit: Hit, qconfig: str) -> str:
    """The call on ``qconfig_mapping`` that gives a node a QConfig and no weaker rule overrides.

    >>> gm = fx.symbolic_trace(lambda x: torch.add(x, 1))
    >>> add = next(node for node in gm.graph.nodes if node.name == "add")
    >>> mapping_call(add, "", Hit(None, None, ("", torch.add, 0)), "default_qconfig")
    "qconfig_mapping.set_module_name_object_type_order('', torch.add, 0, default_qconfig)"
    """
    ordered = hit.rule is not None and hit.rule.kind is RuleKind.MODULE_NAME_OBJECT_TYPE_ORDER
    if hit.use is not None and (ordered or node.op == "call_function"):
        place, object_type, count = hit.use
        return (
            "qconfig_mapping.set_module_name_object_type_order("
            f"{place!r}, {operator_name(object_type)}, {count}, {qconfig})"
        )
    weak = hit.rule is None or hit.rule.kind is RuleKind.GLOBAL
    if node.op == "call_method" and (weak or not path):
        return f"qconfig_mapping.set_object_type({node.target!r}, {qconfig})"
    return f"qconfig_mapping.set_module_name({path!r}, {qconfig})"


@dataclass(frozen=True)
class ObserverFix:
    """An observer class of ``backquant.observe`` with its arguments; ``str`` of it is code that makes it.

    ``values`` ``None``: ``name`` is the code of what was asked for, which stays as it is.

    >>> fix = ObserverFix("MinMaxObserver", {"dtype": torch.qint8, "eps": 2**-12})
    >>> print(fix)
    MinMaxObserver.with_args(dtype=torch.qint8, eps=2**-12)
    >>> fix.make() == observe.MinMaxObserver.with_args(dtype=torch.qint8, eps=2**-12)
    True
    """

    name: str
    values: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        if self.values is None:
            return self.name
        pairs = (f"{key}={_text(key, value)}" for key, value in self.values.items())
        return f"{self.name}.with_args({', '.join(pairs)})"

    def make(self) -> Any:
        """The factory that ``str`` of it is the code of."""
        cls = getattr(observe, self.name)
        if self.values is None:
            return cls
        pairs = self.values.items()
        return cls.with_args(**{k: v.make() if isinstance(v, ObserverFix) else v for k, v in pairs})


def _text(key: str, value: Any) -> str:
    if isinstance(value, ObserverFix):
        return str(value)
    return short_text(value) if key == "eps" else repr(value)


class QConfigFix(NamedTuple):
    """A QConfig as data; ``str`` of it is its code."""

    activation: ObserverFix
    weight: ObserverFix
    output: ObserverFix | None = None

    def __str__(self) -> str:
        output = "" if self.output is None else f",\n    output={self.output}"
        return f"QConfig(\n    activation={self.activation},\n    weight={self.weight}{output})"

    def make(self) -> QConfig:
        """The QConfig itself."""
        output = None if self.output is None else self.output.make()
        return QConfig(self.activation.make(), self.weight.make(), output)


def unconditional(config: DTypeConfig) -> DTypeConfig:
    """``config`` without its conditions.

    >>> unconditional(DTypeConfig(torch.quint8, where={"batch": 1})).where is None
    True
    """
    values = config.to_dict()
    values.pop("where", None)
    return DTypeConfig.from_dict(values)


def qconfig_fix(config: DTypeConfig, requests: QConfigRequest, roles: Roles) -> QConfigFix:
    """A QConfig that a dtype config admits; what is admitted of the request stays as it is.

    >>> config = DTypeConfig(torch.quint8, torch.quint8, torch.qint8)
    >>> request = TensorRequest(torch.quint8, "MinMaxObserver", spelled="MinMaxObserver")
    >>> print(qconfig_fix(config, QConfigRequest(request, None), Roles(True, True, False)))
    QConfig(
        activation=MinMaxObserver,
        weight=MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric))
    """
    weight = (
        _weight_fix(config, requests.weight, roles) if roles.weight else _spelled(requests.weight)
    )
    if roles.activation and roles.output and _differ(config):
        inputs = _activation_fix(
            DTypeConfig(config.input_dtype_with_constraints), requests.activation
        )
        results = _activation_fix(
            DTypeConfig(config.output_dtype_with_constraints), requests.of_output
        )
        return QConfigFix(inputs, weight, results)
    return QConfigFix(_activation_fix(config, requests.activation), weight)


def _differ(config: DTypeConfig) -> bool:
    """Whether no one observer suits input and output."""
    first, second = config.input_dtype_with_constraints, config.output_dtype_with_constraints
    if config.is_dynamic or None in (first.dtype, second.dtype):
        return False
    if first.dtype != second.dtype:
        return True
    one, two = first.to_dict(), second.to_dict()
    clash = any(name in one and name in two and one[name] != two[name] for name in _OF_THE_SCHEME)
    return clash or any((name in one) is not (name in two) for name in _FIXED)


def _spelled(request: TensorRequest | None) -> ObserverFix:
    return ObserverFix("NoopObserver" if request is None else request.spelled)


def _activation_fix(config: DTypeConfig, request: TensorRequest | None) -> ObserverFix:
    demand = config.input_dtype_with_constraints
    if demand.dtype is None:
        demand = config.output_dtype_with_constraints
    dynamic = bool(config.is_dynamic)
    if request is not None and request.is_dynamic == dynamic and not check_tensor(request, demand):
        output = DTypeWithConstraints() if dynamic else config.output_dtype_with_constraints
        if not check_tensor(request, output):
            return _spelled(request)
    if demand.dtype is None:
        return _spelled(request)
    if dynamic:
        values = {"dtype": demand.dtype, "is_dynamic": True, **_range(demand, request)}
        shared = _blocks(demand, request)
        if shared is not None or demand.granularity == "per_token":
            values["granularity"] = str(shared or demand.granularity)
        return ObserverFix("PlaceholderObserver", values)
    return _observer(_merged(demand, config.output_dtype_with_constraints), request)


def _weight_fix(config: DTypeConfig, request: TensorRequest | None, roles: Roles) -> ObserverFix:
    demand = config.weight_dtype_with_constraints
    if roles.sums_axis and demand.channel_axis is None and reads_sums(config):
        demand = replace(demand, ch_axis=roles.sums_axis)
    if demand.dtype is None or (request is not None and not check_tensor(request, demand)):
        return _spelled(request)
    return _observer(demand, request, weight=True)


def _merged(first: DTypeWithConstraints, second: DTypeWithConstraints) -> DTypeWithConstraints:
    """The constraints on input and output combined, where both are for the same dtype."""
    if second.dtype != first.dtype:
        return first
    low = [b for b in (first.quant_min_lower_bound, second.quant_min_lower_bound) if b is not None]
    high = [b for b in (first.quant_max_upper_bound, second.quant_max_upper_bound) if b is not None]
    scale = [
        b for b in (first.scale_min_lower_bound, second.scale_min_lower_bound) if b is not None
    ]
    values = {**first.to_dict(), **second.to_dict()}
    values["quant_min_lower_bound"] = max(low, default=None)
    values["quant_max_upper_bound"] = min(high, default=None)
    values["scale_min_lower_bound"] = max(scale, default=None)
    return DTypeWithConstraints(**values)


def _observer(
    demand: DTypeWithConstraints, request: TensorRequest | None, *, weight: bool = False
) -> ObserverFix:
    assert demand.dtype is not None
    shared = _blocks(demand, request)
    if is_scaled_float(demand.dtype) and shared is None:
        return _narrow_float(demand, request, weight=weight)
    if demand.dtype.is_floating_point and shared is None:
        return ObserverFix("PlaceholderObserver", {"dtype": demand.dtype})
    if demand.scale_exact_match is not None:
        return _fixed(demand, request)
    if shared is not None:
        many_scales = torch.per_channel_affine if demand.symmetric is False else _MANY
        many = {"granularity": str(shared), "dtype": demand.dtype, "qscheme": many_scales}
        return ObserverFix("BlockMinMaxObserver", {**many, **_range(demand, request)})
    values: dict[str, Any] = {"dtype": demand.dtype}
    per_channel = _wants_channels(demand, request, weight=weight)
    values["qscheme"] = _scheme(demand, per_channel=per_channel, weight=weight)
    if demand.channel_axis is not None and per_channel:
        values["ch_axis"] = demand.channel_axis
    values.update(_range(demand, request))
    if values["qscheme"] == torch.per_tensor_affine:
        del values["qscheme"]
    names = _PER_CHANNEL if per_channel else _PER_TENSOR
    asked = request.observer if request is not None else ""
    if request is not None and request.is_fake_quantize:
        inner = "MovingAveragePerChannelMinMaxObserver" if per_channel else _PER_TENSOR[1]
        return ObserverFix("FakeQuantize", {"observer": ObserverFix(inner), **values})
    return ObserverFix(asked if asked in names else names[0], values)


def _narrow_float(
    demand: DTypeWithConstraints, request: TensorRequest | None, *, weight: bool
) -> ObserverFix:
    """An observer of the largest magnitude. It is given the range: hardware may use less than the format
    has."""
    assert demand.dtype is not None
    row = qdtype(demand.dtype)
    per_channel = _wants_channels(demand, request, weight=weight)
    scheme = torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric
    ends = _range(demand, request)
    low, high = ends.get("quant_min", row.low), ends.get("quant_max", row.high)
    values = {"dtype": demand.dtype, "qscheme": scheme, "quant_min": low, "quant_max": high}
    return ObserverFix((_PER_CHANNEL if per_channel else _PER_TENSOR)[0], values)


def _blocks(demand: DTypeWithConstraints, request: TensorRequest | None) -> Granularity | None:
    """The demanded granularity. Where the backend leaves the size open: the requested one, else the usual
    one."""
    wanted = None if demand.granularity is None else Granularity.parse(demand.granularity)
    if wanted is None or not wanted.has_blocks:
        return None
    if request is not None and wanted.admits(request.shared_over):
        return request.shared_over
    if wanted.kind == "per_group":
        return wanted if wanted.size is not None else replace(wanted, size=_USUAL_GROUP)
    return wanted if wanted.shape is not None else replace(wanted, shape=(_USUAL_GROUP,) * 2)


def _fixed(demand: DTypeWithConstraints, request: TensorRequest | None) -> ObserverFix:
    assert demand.dtype is not None
    row = qdtype(demand.dtype)
    values: dict[str, Any] = {
        "scale": demand.scale_exact_match,
        "zero_point": demand.zero_point_exact_match or 0,
        "dtype": demand.dtype,
        "quant_min": row.low,
        "quant_max": row.high,
        **_range(demand, None),
    }
    fix = ObserverFix("FixedQParamsObserver", values)
    if request is not None and request.is_fake_quantize:
        return ObserverFix("FixedQParamsFakeQuantize", {"observer": fix})
    return fix


def _wants_channels(
    demand: DTypeWithConstraints, request: TensorRequest | None, *, weight: bool
) -> bool:
    if demand.granularity is not None:
        return Granularity.parse(demand.granularity).kind == "per_channel"
    if weight and demand.dtype in _ROW_WISE:
        return True
    return request is not None and request.is_per_channel


def _scheme(demand: DTypeWithConstraints, *, per_channel: bool, weight: bool) -> torch.qscheme:
    if weight and demand.dtype in _ROW_WISE and demand.symmetric is None:
        return torch.per_channel_affine_float_qparams
    symmetric = weight if demand.symmetric is None else demand.symmetric
    if per_channel:
        return torch.per_channel_symmetric if symmetric else torch.per_channel_affine
    return torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine


def _range(demand: DTypeWithConstraints, request: TensorRequest | None) -> dict[str, Any]:
    """The demanded bounds, or narrower ones if those were asked for in the same dtype."""
    values: dict[str, Any] = {}
    low, high = demand.quant_min_lower_bound, demand.quant_max_upper_bound
    if low is not None or high is not None:
        assert demand.dtype is not None
        row = qdtype(demand.dtype)
        low = row.low if low is None else int(low)
        high = row.high if high is None else int(high)
        if request is not None and request.dtype == demand.dtype:
            low = low if request.quant_min is None else max(low, request.quant_min)
            high = high if request.quant_max is None else min(high, request.quant_max)
        values.update(quant_min=low, quant_max=high)
    if demand.scale_min_lower_bound is not None:
        values["eps"] = float(demand.scale_min_lower_bound)
    return values


# A QConfig, as code, for an operator that no rule of the mapping quantizes.

_NOTHING = QConfigRequest(None, None)


class Suggestions:
    """Suggests the backend's default QConfig where the entry admits it, else another that the entry admits.

    >>> import torch
    >>> from backquant.backend_config import get_backend_config
    >>> backend = get_backend_config("x86")
    >>> suggestions, roles = Suggestions(backend, QConfigReader(), Judge()), Roles(True, False, False)
    >>> known = [config.pattern for config in backend.shared_configs]
    >>> suggestions.request(known.index(torch.add), roles)
    'get_default_qconfig("x86")'
    >>> suggestions.request(known.index(torch.sigmoid), roles)[:46]
    'QConfig(\\n    activation=FixedQParamsObserver.w'
    """

    def __init__(self, backend: BackendConfig, reader: QConfigReader, judge: Judge) -> None:
        self._backend = backend
        self._entries = backend.shared_configs
        self._reader = reader
        self._judge = judge

    def request(self, entry: int, roles: Roles) -> str:
        """For an operator that matches ``entry``; below zero for modules that match none."""
        if entry < 0:
            return "default_qconfig" if self._default is None else self._default_code
        config = self._entries[entry]
        if self._default is not None and self._admits(entry, config, self._default, roles):
            return self._default_code
        nearest = self._judge.rule(entry, config, _NOTHING, roles).nearest
        if nearest is None:
            return ""
        return str(qconfig_fix(config.dtype_configs[nearest], _NOTHING, roles))

    @property
    def _default_code(self) -> str:
        return f"get_default_qconfig({literal(self._backend.name)})"

    @cached_property
    def _default(self) -> QConfig | None:
        try:
            return get_default_qconfig(self._backend.name)
        except BackquantError:  # a backend that is not registered under its name
            return None

    def _admits(
        self, entry: int, config: BackendPatternConfig, qconfig: QConfig, roles: Roles
    ) -> bool:
        where = self._default_code
        reader = self._reader
        requests = QConfigRequest(
            reader.activation(qconfig, where),
            reader.weight(qconfig, where),
            reader.output(qconfig, where),
        )
        return self._judge.rule(entry, config, requests, roles).dtype_config is not None


# Rules of a QConfigMapping that applied to no node.
def unused_rules(
    table: RuleTable,
    decisions: Mapping[str, Decision],
    scopes: Mapping[str, Scope],
    fusions: Iterable[Fusion] = (),
) -> tuple[tuple[RuleRef, ...], tuple[str, ...]]:
    """Rules that applied to no node, but defaults of a backend; and notes on probable mistakes.

    >>> from backquant.qconfig import QConfigMapping
    >>> table = RuleTable(QConfigMapping().set_module_name("decodr", None))
    >>> unused_rules(table, {}, {"relu": Scope("decoder", None)})[1]
    ('module_name "decodr" matches no module (did you mean "decoder"?)',)
    """
    used = {decision.rule for decision in decisions.values()}
    unused = tuple(rule for rule in table.rules if rule not in used | table.defaults)
    paths = _module_paths(scopes)
    fused = _fused_into(scopes, fusions)
    notes = (_note(rule, table, paths, fused) for rule in unused)
    return unused, tuple(note for note in notes if note)


def _module_paths(scopes: Mapping[str, Scope]) -> dict[str, None]:
    paths: dict[str, None] = {}
    for scope in scopes.values():
        path = label(scope.path)
        while path and path not in paths:
            paths[path] = None
            path = path.rpartition(".")[0]
    return paths


def _fused_into(scopes: Mapping[str, Scope], fusions: Iterable[Fusion]) -> dict[str, str]:
    into: dict[str, str] = {}
    for fusion in fusions:
        root = scopes.get(fusion.root)
        for name in fusion.nodes:
            scope = scopes.get(name)
            if root is not None and scope is not None and name != fusion.root:
                into[label(scope.path)] = label(root.path)
    return into


def _note(rule: RuleRef, table: RuleTable, paths: dict[str, None], fused: dict[str, str]) -> str:
    target = table.targets[rule]
    if rule.kind is RuleKind.MODULE_NAME_REGEX:
        return f'module_name_regex "{target}" applies to no module'
    if rule.kind is RuleKind.OBJECT_TYPE:
        return ""
    name = label(target if rule.kind is RuleKind.MODULE_NAME else target[0])
    text = f'{rule.kind.value} "{rule.key}"'
    if name in fused:
        return f'{text} does nothing: "{name}" became a part of "{fused[name]}"'
    if name and name not in paths:
        meant = did_you_mean(name, paths, most=2, quote='"{}"'.format)
        return f"{text} matches no module" + (f" ({meant})" if meant else "")
    return f"{text} applies to no operator"


# Which group size an operator takes where it does not take the one that is requested: tried, not guessed.
#
# 1. A size that is proposed divides the weight's axis, is one that the dtype config has scales for, and
#    satisfies the conditions of the entry and of the dtype config, which may speak of it.
# 2. Of several the nearest to the requested one, by their ratio. Where there is none, no size is proposed.


def divided(asked: TensorRequest, use: UseFacts) -> tuple[Refusal, ...]:
    """The refusal of a group or block size that does not divide the weight, if it does not."""
    wrong = divides(asked, *use.weight_shape())
    return () if wrong is None else (wrong,)


def with_group_size(
    refusals: tuple[Refusal, ...],
    asked: TensorRequest | None,
    use: UseFacts,
    of: tuple[BackendPatternConfig, DTypeConfig],
) -> tuple[Refusal, ...]:
    """``refusals``, which propose one group size that ends them all, or none."""
    if not refusals or asked is None or asked.shared_over.kind != "per_group":
        return refusals
    size = _size_that_fits(asked, use, of)
    silent = tuple(replace(one, fix="") if _is_of_size(one) else one for one in refusals)
    if size is None:
        return silent
    return (
        replace(refusals[0], fix=f"group_size={size}"),
        *(replace(o, fix="") for o in refusals[1:]),
    )


def _is_of_size(refusal: Refusal) -> bool:
    return refusal.fix.startswith(("group size", "group_size"))


def _size_that_fits(
    asked: TensorRequest, use: UseFacts, of: tuple[BackendPatternConfig, DTypeConfig]
) -> int | None:
    """Rules 1 and 2."""
    requested = asked.shared_over.size
    config, one = of
    demand = one.weight_dtype_with_constraints.granularity
    if requested is None or demand is None:
        return None
    for size in sorted(_divisors(asked, use), key=lambda n: abs(math.log(n / requested))):
        shared = replace(asked.shared_over, size=size)
        with_size = replace(use, group_size=size)
        if not Granularity.parse(demand).admits(shared):
            continue
        if not unmet(config.where, with_size) and not unmet(one.where, with_size):
            return size
    return None


def _divisors(asked: TensorRequest, use: UseFacts) -> Iterator[int]:
    """Sizes of two weights or more that divide the axis."""
    shape, _ = use.weight_shape()
    axis = -1 if asked.shared_over.axis is None else asked.shared_over.axis
    length = shape[axis] if -len(shape) <= axis < len(shape) else 0
    yield from (n for n in range(2, length + 1) if length % n == 0)
