"""What is asked for where a user says little: a default, or weights alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import type_before_parametrizations

from backquant.backend_config import (
    BackendConfig,
    BackendDefaults,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    QuantDefault,
    get_backend_config,
    list_backends,
)
from backquant.dtypes import (
    Granularity,
    QDType,
    find_dtype,
    is_quantized,
    known_dtypes,
    quantize_bounds,
)
from backquant.errors import ConfigError, UsageError, did_you_mean, literal
from backquant.lower import EngineInfo
from backquant.match.plan import Plan
from backquant.observe import (
    BlockMinMaxObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)
from backquant.operators import find
from backquant.prepare import Request
from backquant.qconfig import (
    PrepareCustomConfig,
    QConfig,
    QConfigMapping,
    get_default_qconfig_mapping,
)
from backquant.qconfig.build import ptq_qconfig
from backquant.qconfig.default_mapping import mapping_with_defaults

# How many bits activations get when the user asks for nothing: 8 where the engine sums products of 8 bits
# without saturation on this CPU, 7 where it does not.
#
# ``get_default_qconfig_mapping`` stays PyTorch's; this is the choice of ``quantize`` and ``explain``. Where
# only the kernels of depthwise convolutions saturate (fbgemm with VNNI) and the model is known, it is their
# weights that take 7 bits: activations are shared by all operators, weights are not.
#
# Source: oneDNN developer guide, "Nuances of int8 computations": without VNNI two products of 8 bits are
# summed in 16 bits, which saturates unless one factor has 7 bits.


@dataclass(frozen=True)
class DefaultedRequest:
    """The request of ``quantize`` and ``explain``. ``own``: the backend's default mappings, PyTorch's and
    ours, to tell whether the request is a default. ``notes``: what was chosen for the user. ``implied``:
    the rules were derived from another argument, such as ``weights``."""

    request: Request
    own: tuple[QConfigMapping, ...]
    notes: tuple[str, ...]
    implied: bool = False

    @classmethod
    def of(
        cls,
        config: BackendConfig,
        engine: EngineInfo | None,
        mapping: QConfigMapping | None = None,
        custom: PrepareCustomConfig | None = None,
        model: nn.Module | None = None,
    ) -> DefaultedRequest:
        """The request for ``mapping``, or for what is asked for by default on this engine, for ``model``.

        >>> from backquant.backend_config import get_backend_config
        >>> requested = DefaultedRequest.of(get_backend_config("tensorrt"), None)
        >>> requested.request.qconfig_mapping is requested.own[1], requested.notes
        (True, ())
        """
        try:
            default, notes = mapping_on_engine(config, engine, model)
        except ConfigError:  # it has no default: nothing static, say
            if mapping is None:
                raise
            return cls(Request(config, mapping, custom), (), ())
        own = (get_default_qconfig_mapping(config), default)
        if mapping is None:
            return cls(Request(config, default, custom), own, notes)
        return cls(Request(config, mapping, custom), own, ())

    def annotated(self, plan: Plan) -> Plan:
        """``plan`` with the notes; rules that were derived are no news when unused."""
        unused = () if self.implied else plan.unused_rules
        return replace(plan, unused_rules=unused).noted(*self.notes)


def mapping_on_engine(
    config: BackendConfig, engine: EngineInfo | None, model: nn.Module | None = None
) -> tuple[QConfigMapping, tuple[str, ...]]:
    """What is asked for by default on this engine, and a note that says which range it is.

    The backend's own default is kept where it does not measure unsigned 8-bit activations in a range
    that it leaves open, where the backend's entries admit no other range, and without an engine. ``model``:
    what is to be quantized, where that is known.

    >>> from backquant.backend_config import get_backend_config
    >>> from backquant.lower import engine_info
    >>> mapping, (note, _) = mapping_on_engine(get_backend_config("qnnpack"), engine_info("qnnpack"))
    >>> mapping.global_qconfig.activation, note[:25]
    (HistogramObserver.with_args(reduce_range=False), 'activations take 8 bits: ')
    """
    if engine is None or config.defaults is None or not _is_open(config.defaults.activation):
        return get_default_qconfig_mapping(config), ()
    narrow = _narrow_depthwise(engine, model)
    reason = "" if narrow is not None else narrow_because(engine)
    reduced = bool(reason)
    if not reduced and not _admits(config, quantize_bounds(torch.quint8)):
        return get_default_qconfig_mapping(config), ()
    requested = replace(config.defaults.activation, reduce_range=reduced)
    defaults = replace(config.defaults, activation=requested)
    wide = f"{engine.name} on {engine.isa} sums products of 8 bits without saturation"
    notes = [f"activations take {7 if reduced else 8} bits: {reason or wide}"]
    if not engine.as_described and _has_open_tensor_weights(config):
        defaults = _by_channel(defaults)
        notes.append("weights have a scale for each output channel")
    mapping = mapping_with_defaults(config, defaults)
    if narrow:
        qconfig = ptq_qconfig(replace(defaults, weight=_narrow(defaults.weight)))
        for path in narrow:
            mapping.set_module_name(path, qconfig)
        kernels = "depthwise kernels sum products in 16 bits"
        notes.append(
            f"weights of {len(narrow)} convolutions take 7 bits: {engine.name}'s {kernels}"
        )
    return mapping, tuple(notes)


def _narrow_depthwise(engine: EngineInfo, model: nn.Module | None) -> list[str] | None:
    """The depthwise convolutions of ``model`` whose weights are to take 7 bits; ``None`` where that does not
    do: where other kernels saturate, too, or the backend's rules for transposed ones are others.
    """
    if model is None or not engine.wide_accumulation or engine.wide_depthwise:
        return None
    found = [(path, module) for path, module in model.named_modules() if _is_depthwise(module)]
    if any(module.transposed for _, module in found):
        return None
    return [path for path, _ in found]


def _is_depthwise(module: nn.Module) -> bool:
    return isinstance(module, _ConvNd) and module.groups > 1 and module.weight.shape[1] == 1


def _narrow(weight: QuantDefault | None, bits: int = 7) -> QuantDefault:
    half = 2 ** (bits - 1)
    return replace(weight or QuantDefault("minmax"), quant_min=-half, quant_max=half - 1)


def mapping_with_weight_bits(config: BackendConfig, bits: int) -> QConfigMapping:
    """The backend's default mapping, with all weights limited to the range of so many bits.

    Raises ``UsageError`` for a number of bits that is no smaller than 8, ``ConfigError`` for a backend
    without defaults.

    >>> from backquant.backend_config import get_backend_config
    >>> mapping = mapping_with_weight_bits(get_backend_config("onnxruntime"), 7)
    >>> mapping.global_qconfig.weight().quant_min
    -64
    """
    if bits not in range(2, 8):
        raise UsageError(
            f"{bits!r} is no smaller range of 8-bit weights",
            where="weight_bits",
            fix="weight_bits=7",
        )
    defaults = config.defaults
    if defaults is None:
        return get_default_qconfig_mapping(config)
    overrides = tuple(
        replace(each, weight=_narrow(each.weight, bits)) if each.weight else each
        for each in defaults.overrides
    )
    weight = _narrow(defaults.weight, bits)
    return mapping_with_defaults(config, replace(defaults, weight=weight, overrides=overrides))


def _has_open_tensor_weights(config: BackendConfig) -> bool:
    """Whether weights get one scale per tensor by default although the backend's entries admit one per
    channel. With one scale, a row that is much larger than the others makes zeros of these.
    """
    weight = config.defaults.weight if config.defaults is not None else None
    if weight is None or weight.qscheme is not torch.per_tensor_symmetric:
        return False
    asked = (
        dtypes.weight_dtype_with_constraints
        for entry in config.shared_configs
        for dtypes in entry.dtype_configs
    )
    integers = [each for each in asked if each.dtype is torch.qint8]
    return bool(integers) and all(each.granularity is None for each in integers)


def _by_channel(defaults: BackendDefaults) -> BackendDefaults:
    """The mapping with per-channel weights; transposed convolutions keep one scale, since no kernel takes
    more."""
    overrides = tuple(
        replace(each, weight=defaults.weight, qat_weight=defaults.qat_weight)
        if each.weight is None and any(map(_is_transposed, each.operators))
        else each
        for each in defaults.overrides
    )
    weight = replace(
        defaults.weight or QuantDefault("minmax"),
        observer="per_channel_minmax",
        qscheme=torch.per_channel_symmetric,
    )
    return replace(defaults, weight=weight, overrides=overrides)


def _is_transposed(operator: Any) -> bool:
    known = find(operator)
    return known is not None and known.name.startswith("conv_transpose")


def narrow_because(engine: EngineInfo) -> str:
    """Why 8-bit activations may saturate; empty if they cannot."""
    if not engine.wide_accumulation:
        return f"{engine.isa} has no VNNI, and two products of 8 bits may saturate"
    if not engine.wide_depthwise:
        return f"{engine.name}'s depthwise kernels sum products in 16 bits"
    return ""


def _is_open(activation: QuantDefault) -> bool:
    """Whether the range is the whole or the reduced one of quint8, with nothing said of bounds."""
    unsigned = activation.dtype in (None, torch.quint8)
    return unsigned and activation.quant_min is None and activation.reduce_range is not None


def _admits(config: BackendConfig, bounds: tuple[int, int]) -> bool:
    """Whether no entry limits unsigned activations to less than ``bounds``."""
    for entry in config.shared_configs:
        for dtypes in entry.dtype_configs:
            requested = dtypes.input_dtype_with_constraints
            if requested.dtype is not torch.quint8:
                continue
            low, high = requested.quant_min_lower_bound, requested.quant_max_upper_bound
            if (low is not None and low > bounds[0]) or (high is not None and high < bounds[1]):
                return False
    return True


# The request for weights of few bits, from what a backend's description admits.
#
# 1. The dtype configs that count are those whose weight has the bits and the sign that are asked for and
#    whose activations need no data: float, cast to a narrower float, or quantized at each call.
# 2. Of one entry the first counts that admits the group size. Without a group size that is one scale per
#    output channel where the entry has it, else groups of 128 or of the one size that it has.
# 3. What the entry asks of activations is asked with it, and of what it fuses, too.
# 4. By path, layers may have other weights than the rest: a dtype, with the group size behind a colon.


_USUAL_GROUP = 128
#: Formats of blocks by their common names: the dtype and how many weights share a scale.
BLOCK_FLOATS = {
    "mxfp4": ("float4_e2m1fn_x2", 32),
    "mxfp8": ("float8_e4m3fn", 32),
    "nvfp4": ("float4_e2m1fn_x2", 16),
}


def weight_only_mapping(
    backend: str | BackendConfig, weights: str, group_size: int | None = None
) -> QConfigMapping:
    """The mapping that ``quantize(model, weights=..., group_size=...)`` uses, as a start for one's own.

    Args:
        backend: a name, a file, or a ``BackendConfig``.
        weights: a dtype by name: ``"int8"``, ``"int4"``, ``"uint4"``, ``"int2"``, …, with a group
            size or not (``"int4:64"``); or ``"mxfp4"``, ``"mxfp8"``, ``"nvfp4"``: 4- and 8-bit floats in
            groups of 32, 32 and 16.
        group_size: how many weights of one row share a scale. Default: rule 2.

    Raises ``UsageError`` for an unknown dtype, and if no entry of the backend admits such weights.

    >>> mapping = weight_only_mapping("onnxruntime", "int4", 32)
    >>> mapping.object_type_qconfigs[torch.nn.Linear].weight().granularity
    'per_group(size=32)'
    """
    config = backend if isinstance(backend, BackendConfig) else get_backend_config(backend)
    weights, group_size = _spelled(weights, group_size)
    row = _row(weights)
    if group_size is not None and (type(group_size) is not int or group_size < 2):
        raise UsageError(
            f"a group has two weights or more, got group_size={group_size!r}",
            where="group_size",
            fix=f"group_size={next((n for n in (32, 64, 128) if any(_requests(config, row, n))), None)}",
        )
    mapping = QConfigMapping()
    found = dict(reversed(list(_requests(config, row, group_size))))  # the first counts
    if not found:
        raise _refused(config, row, group_size)
    for operator, qconfig in found.items():
        mapping.set_object_type(operator, qconfig)
    return mapping


def weights_by_path(
    backend: BackendConfig,
    weights: Mapping[str, str | None],
    group_size: int | None,
    model: nn.Module,
) -> QConfigMapping:
    """Rule 4, of the modules of ``model``; ``""`` is the whole model, ``None`` leaves in float.

    Raises ``UsageError`` as ``weight_only_mapping``, and for a path without a layer that has such weights.

    >>> model = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 64))
    >>> given = {"": "int8", "0": "int4:32", "1": None}
    >>> mapping = weights_by_path(get_backend_config("onnxruntime"), given, None, model)
    >>> mapping.module_name_qconfigs["0"].weight().granularity, mapping.module_name_qconfigs["1"]
    ('per_group(size=32)', None)
    """
    rest = weights.get("")
    mapping = QConfigMapping() if rest is None else weight_only_mapping(backend, rest, group_size)
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in sorted((path for path in weights if path != ""), key=str):
        # what is inside comes after what holds it
        text = weights[path]
        if text is None and path in modules:
            mapping.set_module_name(path, None)
            continue
        known = weight_only_mapping(backend, text or "int8").object_type_qconfigs
        fits = [one for one, part in modules.items() if type_before_parametrizations(part) in known]
        fix = f"weights={{{literal(fits[0])}: {literal(text)}}}" if fits else "weights=None"
        if path not in modules:
            fix = did_you_mean(path, modules, fix) if isinstance(path, str) else fix
            raise UsageError(f"the model has no module {path!r}", where="weights", fix=fix)
        inside = {
            name: known[type_before_parametrizations(module)]
            for name, module in modules.items()
            if (name == path or name.startswith(f"{path}."))
            and type_before_parametrizations(module) in known
        }
        if not inside:
            raise UsageError(
                f"no layer of {path!r} has weights that {backend.name} quantizes to {text}",
                where=f"weights[{path!r}]",
                fix=fix,
            )
        for name, qconfig in inside.items():
            mapping.set_module_name(name, qconfig)
    return mapping


def _spelled(weights: Any, group_size: int | None) -> tuple[str, int | None]:
    """The dtype and the group size of ``"int4"``, ``"int4:64"`` or ``"mxfp4"``."""
    if not isinstance(weights, str):
        rows = [row.name for row in known_dtypes() if row.has_scale and row.name in str(weights)]
        raise UsageError(
            f"a dtype for weights is named by a text, not by {weights!r}",
            where="weights",
            fix=f"weights={literal(rows[0] if rows else 'int8')}",
        )
    dtype, _, size = weights.partition(":")
    if size and (not size.isdecimal() or int(size) < 2):
        raise UsageError(
            f"{weights!r} is no dtype with a group size",
            where="weights",
            fix=f"did you mean {literal(dtype + ':64')}?",
        )
    group_size = int(size) if size else group_size
    return BLOCK_FLOATS.get(dtype, (dtype, None)) if group_size is None else (dtype, group_size)


def _row(weights: str) -> QDType:
    rows = {row.name: row for row in known_dtypes() if row.has_scale}
    if weights not in rows:
        known = ["int8", "int4", "uint4", "int3", "uint3", "int2", "uint2"]
        raise UsageError(
            f"{weights!r} is no dtype for weights",
            where="weights",
            fix=did_you_mean(weights, rows, f"one of {', '.join(known)}"),
        )
    return rows[weights]


def _requests(
    config: BackendConfig, row: QDType, group_size: int | None
) -> Iterator[tuple[Any, QConfig]]:
    for entry in config.shared_configs:
        qconfig = _request(entry, row, group_size)
        if qconfig is None:
            continue
        for node in entry.normal_pattern.nodes:
            if node.kind in ("module", "function", "method") and not _is_ours(node.op):
                yield from ((op, qconfig) for op in _spellings(node.op))


def _spellings(op: Any) -> tuple[Any, ...]:
    """How else the graph may say it: matching takes ``torch.relu`` for ``F.relu``."""
    known = None if isinstance(op, type) else find(op)
    return (op,) if known is None else (op, *known.functions)


def _is_ours(op: Any) -> bool:
    """Modules for training, and those that fusion makes: nobody writes them."""
    return isinstance(op, type) and op.__module__.startswith("backquant.")


def _request(entry: BackendPatternConfig, row: QDType, group_size: int | None) -> QConfig | None:
    """Rule 2."""
    fitting = [config for config in entry.dtype_configs if _needs_no_data(config, row)]
    options = [(config, _shared(config, group_size)) for config in fitting]
    if group_size is None:  # one scale per channel comes first
        options.sort(key=lambda option: option[1] is None or option[1].has_blocks)
    for config, shared in options:
        if shared is not None:
            demand = config.weight_dtype_with_constraints
            return QConfig(_activation(config), _weight(demand, shared))
    return None


def _needs_no_data(config: DTypeConfig, row: QDType) -> bool:
    """Rule 1."""
    own = find_dtype(config.weight_dtype)
    same = own is not None and (own.bits, own.format) == (row.bits, row.format)
    given = config.input_dtype
    packed = (own or row).packed and not row.is_float
    return same and not packed and (bool(config.is_dynamic) or not is_quantized(given))


def _shared(config: DTypeConfig, group_size: int | None) -> Granularity | None:
    """What one scale is for, if this dtype config admits the group size."""
    text = config.weight_dtype_with_constraints.granularity
    demand = None if text is None else Granularity.parse(text)
    if group_size is None:
        if demand is None or demand.kind == "per_channel":
            axis = None if demand is None else demand.axis
            return Granularity("per_channel", axis=axis)
        if demand.kind == "per_group":
            return Granularity("per_group", axis=demand.axis, size=demand.size or _USUAL_GROUP)
        return demand
    if demand is None or demand.kind != "per_group":
        return None
    groups = Granularity("per_group", axis=demand.axis, size=group_size)
    return groups if demand.admits(groups) else None


def _activation(config: DTypeConfig) -> Any:
    """Rule 3."""
    demand = config.input_dtype_with_constraints
    if not config.is_dynamic:
        return PlaceholderObserver.with_args(dtype=demand.dtype or torch.float32)
    values: dict[str, Any] = {"dtype": demand.dtype, "is_dynamic": True}
    if demand.granularity is not None:
        values["granularity"] = demand.granularity
    row = find_dtype(demand.dtype)
    if row is not None and row.is_integer:
        low, high = demand.quant_min_lower_bound, demand.quant_max_upper_bound
        values["quant_min"] = row.low if low is None else int(low)
        values["quant_max"] = row.high if high is None else int(high)
    return PlaceholderObserver.with_args(**values)


def _weight(demand: DTypeWithConstraints, shared: Granularity) -> Any:
    row = find_dtype(demand.dtype)
    assert row is not None
    unsigned = row.low == 0
    affine = demand.symmetric is False or (demand.symmetric is None and unsigned)
    values: dict[str, Any] = {"dtype": row.token}
    low, high = demand.quant_min_lower_bound, demand.quant_max_upper_bound
    if low is not None or high is not None:
        values["quant_min"] = row.low if low is None else int(low)
        values["quant_max"] = row.high if high is None else int(high)
    if demand.scale_min_lower_bound is not None:
        values["eps"] = float(demand.scale_min_lower_bound)
    if shared.kind == "per_tensor":
        scheme = torch.per_tensor_affine if affine else torch.per_tensor_symmetric
        return MinMaxObserver.with_args(qscheme=scheme, **values)
    values["qscheme"] = torch.per_channel_affine if affine else torch.per_channel_symmetric
    if shared.has_blocks:
        return BlockMinMaxObserver.with_args(granularity=str(shared), **values)
    axis = shared.axis if demand.ch_axis is None else demand.ch_axis
    return PerChannelMinMaxObserver.with_args(ch_axis=axis or 0, **values)


def _refused(config: BackendConfig, row: QDType, group_size: int | None) -> UsageError:
    groups = "" if group_size is None else f" in groups of {group_size}"
    has = [
        other for other in list_backends() if other != config.name and _has(other, row, group_size)
    ]
    has.sort(key=lambda name: get_backend_config(name).engine != config.engine)
    fix = f"backend={has[0]!r}" if has else "an entry with such a weight_dtype and granularity"
    if group_size is not None and any(_requests(config, row, None)):
        fix = f"weights={row.name!r}, without group_size"
    own = dict.fromkeys(_own(config))
    listed = ", ".join(own) or "none"
    return UsageError(
        f"{config.name or 'the backend'} has no entry for {row.name} weights{groups} that needs no data",
        where=f"weights={row.name!r}, group_size={group_size!r}; it has {listed}",
        fix=fix,
    )


def _has(backend: str, row: QDType, group_size: int | None) -> bool:
    return any(_requests(get_backend_config(backend), row, group_size))


def _own(config: BackendConfig) -> Iterator[str]:
    """What the backend has instead, in words."""
    for entry in config.shared_configs:
        for one in entry.dtype_configs:
            demand, row = one.weight_dtype_with_constraints, find_dtype(one.weight_dtype)
            if row is not None and row.is_stored and _needs_no_data(one, row):
                shared = "per channel" if demand.granularity is None else demand.granularity
                yield f"{row.name} {Granularity.parse(shared).words if '_' in shared else shared}"
