"""How many bits activations get when the user asks for nothing: 8 where the engine sums products of
8 bits without saturation on this CPU, 7 where it does not.

``get_default_qconfig_mapping`` stays PyTorch's; this is the choice of ``quantize`` and ``explain``. Where
only the kernels of depthwise convolutions saturate (fbgemm with VNNI) and the model is known, it is their
weights that take 7 bits: activations are shared by all operators, weights are not.

Source: oneDNN developer guide, "Nuances of int8 computations": without VNNI two products of 8 bits
are summed in 16 bits, which saturates unless one factor has 7 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from backquant.backend_config import BackendConfig, BackendDefaults, QuantDefault
from backquant.dtypes import quantize_bounds
from backquant.errors import ConfigError
from backquant.lower import EngineInfo
from backquant.match.plan import Plan, RuleKind, RuleRef
from backquant.operators import find
from backquant.prepare import Request
from backquant.qconfig import (
    PrepareCustomConfig,
    QConfig,
    QConfigMapping,
    get_default_qconfig_mapping,
    qconfig_equals,
)
from backquant.qconfig.build import ptq_qconfig
from backquant.qconfig.default_mapping import mapping_with_defaults


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
        """``plan`` with the notes; rules that stand in the backend's own mapping are no news when unused."""
        unused = tuple(rule for rule in plan.unused_rules if not self._is_of_the_backend(rule))
        return replace(plan, unused_rules=unused).noted(*self.notes)

    def _is_of_the_backend(self, rule: RuleRef) -> bool:
        mapping = self.request.qconfig_mapping
        if self.implied or any(mapping is own for own in self.own):
            return True
        if rule.kind is not RuleKind.OBJECT_TYPE:
            return False
        key, requested = list(mapping.object_type_qconfigs.items())[rule.index]
        known = (mapping.object_type_qconfigs for mapping in self.own)
        own = [found[key] for found in known if key in found]
        return any(_same(qconfig, requested) for qconfig in own)


def _same(one: QConfig | None, other: QConfig | None) -> bool:
    if one is None or other is None:
        return one is other
    return qconfig_equals(one, other)


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


def _is_depthwise(module: Any) -> bool:
    return isinstance(module, _ConvNd) and module.groups > 1 and module.weight.shape[1] == 1


def _narrow(weight: QuantDefault | None) -> QuantDefault:
    return replace(weight or QuantDefault("minmax"), quant_min=-64, quant_max=63)


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
