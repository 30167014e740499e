"""The observer for one tensor: the rule that asks for it, and the module that it makes.

A spec is data (it travels with the prepared model); ``ObserverSource`` turns it into modules.
Each spec is probed once: one throw-away observer tells type, dtype and kind.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from backquant.backend_config import BackendConfig
from backquant.dtypes import find_dtype, is_narrow_float
from backquant.errors import ConfigError
from backquant.match.plan import RuleRef
from backquant.match.readable_names import entry_text
from backquant.observe import (
    HistogramObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)
from backquant.observe.partial import ObserverPartial
from backquant.observe.protocol import (
    is_fake_quantize,
    is_fixed_qparams,
    is_observer_or_fake_quantize,
    is_reuse_input,
    lacks_of_observer,
)
from backquant.qconfig import QConfig, QConfigMapping

# Observers whose only state is a range that can be reset.
_FORGETFUL = (MinMaxObserver, PerChannelMinMaxObserver)
# Observers that hold only settings and buffers: copying one is faster than calling the factory again.
_COPIED = (*_FORGETFUL, HistogramObserver)
_TABLES = frozenset({dict, OrderedDict, list, set})


@dataclass(frozen=True)
class ObserverSpec:
    """Where an observer comes from.

    ``part`` is ``activation``, ``weight`` or ``output`` of the rule's QConfig; ``bias``;
    ``output_overwrite`` of the backend's entry ``entry``; or ``input_of_fixed``: see ``ObserverSource``.
    """

    rule: RuleRef | None
    part: str
    entry: int = -1


@dataclass(frozen=True)
class Probe:
    """What a spec makes. ``kind`` is None when nothing is observed."""

    kind: type | None = None
    dtype: torch.dtype | None = None
    is_dynamic: bool = False
    reuses_input: bool = False
    fixed: bool = False

    @property
    def observable(self) -> bool:
        """Whether tensors of this dtype get an observer in the graph (float32 does not).

        *Different:* bfloat16 does. PyTorch leaves it out, and so the model as it is.
        """
        return is_observed(self.dtype)


class ObserverSource:
    """Makes observers and fake-quantizers for specs.

    The input of an operator with fixed qparams (sigmoid) is not in the range of its output. When
    such an input needs an observer, PyTorch inserts one with the output's qparams, which clips the
    input to [0, 1]. Here the part ``input_of_fixed`` takes the mapping's global activation if it has
    the same dtype and measures, else a min/max observer of that dtype.

    >>> from backquant.match.plan import RuleKind
    >>> ask = QConfig(MinMaxObserver, MinMaxObserver.with_args(dtype=torch.qint8))
    >>> source = ObserverSource(BackendConfig("b"), QConfigMapping().set_global(ask))
    >>> spec = ObserverSpec(RuleRef(RuleKind.GLOBAL, 0, ""), "weight")
    >>> source.probe(spec).dtype, type(source.make(spec)).__name__
    (torch.qint8, 'MinMaxObserver')
    """

    def __init__(self, backend_config: BackendConfig, qconfig_mapping: QConfigMapping) -> None:
        self._entries = backend_config.shared_configs
        self._mapping = qconfig_mapping
        self._qconfigs: dict[RuleRef, QConfig | None] = {}
        self._factories: dict[ObserverSpec, Callable[[], Any] | None] = {}
        self._probes: dict[ObserverSpec, Probe] = {}
        self._reused: dict[ObserverSpec, Any] = {}
        self._fresh: dict[ObserverSpec, nn.Module] = {}

    def qconfig(self, rule: RuleRef | None) -> QConfig | None:
        """The QConfig that ``rule`` gives, or None when no rule applied."""
        if rule is None:
            return None
        if rule not in self._qconfigs:
            self._qconfigs[rule] = self._mapping.lookup(rule.kind, rule.index)
        return self._qconfigs[rule]

    def probe(self, spec: ObserverSpec) -> Probe:
        """What ``spec`` makes. Raises ConfigError when the factory makes no observer."""
        if spec not in self._probes:
            made = self._make_checked(spec)
            self._probes[spec] = Probe() if made is None else _probe(made)
        return self._probes[spec]

    def make(self, spec: ObserverSpec) -> nn.Module:
        """A fresh observer. Raises ConfigError when the spec asks for none."""
        if spec in self._fresh:
            return _twin(self._fresh[spec])
        made = self._make_checked(spec)
        if made is None:
            raise ConfigError(
                "an observer was asked for where the QConfig has none",
                where=f"{spec.rule}: {spec.part}",
                fix=f"QConfig({spec.part}=MinMaxObserver, ...)",
            )
        factory = self._factories[spec]
        plain = isinstance(factory, ObserverPartial) and not factory.callable_args
        if plain and type(made) in _COPIED:  # with callable arguments each observer may differ
            self._fresh[spec] = _twin(made)
        return made

    def reused(self, spec: ObserverSpec) -> nn.Module:
        """An observer without measurements, for one tensor; the next call resets and returns the same module.

        Raises ConfigError when the spec asks for none.
        """
        known = self._reused.get(spec)
        if known is None:
            known = self._reused[spec] = self.make(spec)
        elif type(known) in _FORGETFUL:
            known.reset_min_max_vals()
        else:
            known = self.make(spec)
        return known

    def _make_checked(self, spec: ObserverSpec) -> nn.Module | None:
        if spec not in self._factories:
            self._factories[spec] = self._factory(spec)
        factory = self._factories[spec]
        if factory is None:
            return None
        made = factory()
        if not is_observer_or_fake_quantize(made):
            raise ConfigError(
                f"the {spec.part} makes a {type(made).__name__}, which is neither an observer nor "
                f"a fake-quantizer: {lacks_of_observer(made)}",
                where=self._place(spec),
                fix="its class needs an attribute dtype, forward(x) -> x, and "
                "calculate_qparams() -> (scale, zero_point)",
            )
        return made  # type: ignore[no-any-return]

    def _place(self, spec: ObserverSpec) -> str:
        if spec.entry < 0:
            return f"QConfigMapping: {spec.rule}"
        return f"backend, entry {spec.entry} ({entry_text(self._entries[spec.entry])})"

    def _factory(self, spec: ObserverSpec) -> Callable[[], Any] | None:
        qconfig = self.qconfig(spec.rule)
        if qconfig is None:
            return None
        if spec.part == "output_overwrite":
            return self._overwrite(spec.entry, qconfig)
        if spec.part == "bias":
            return PlaceholderObserver.with_args(dtype=_bias_dtype(qconfig))
        if spec.part == "input_of_fixed":
            return self._measuring(qconfig)
        factory: Callable[[], Any] | None = getattr(qconfig, spec.part)
        return factory

    def _overwrite(self, entry: int, qconfig: QConfig) -> Callable[[], Any] | None:
        config = self._entries[entry]
        trains = is_fake_quantize(qconfig.activation())
        overwrite = (
            config._overwrite_output_fake_quantize if trains else config._overwrite_output_observer
        )
        return overwrite if overwrite is not None else qconfig.activation

    def _measuring(self, qconfig: QConfig) -> Callable[[], Any]:
        wanted = _probe(qconfig.activation()).dtype
        general = self._mapping.global_qconfig
        if general is not None and general.activation is not None:
            probe = _probe(general.activation())
            if probe.dtype == wanted and not (probe.fixed or probe.reuses_input):
                return general.activation  # type: ignore[no-any-return]
        return MinMaxObserver.with_args(dtype=wanted)


def is_observed(dtype: torch.dtype | None) -> bool:
    """Whether activations of this dtype get an observer in the graph.

    >>> is_observed(torch.uint16), is_observed(torch.quint4x2), is_observed(torch.float32)
    (True, False, False)
    """
    row = find_dtype(dtype)
    return row is not None and row.is_observed


def _twin(observer: nn.Module) -> nn.Module:
    """A copy of an observer that holds nothing but settings, buffers and tables without modules."""
    made: nn.Module = object.__new__(type(observer))
    own = made.__dict__
    for name, value in observer.__dict__.items():
        own[name] = value.copy() if type(value) in _TABLES else value
    buffers = observer._buffers.items()
    own["_buffers"] = {name: None if b is None else b.detach().clone() for name, b in buffers}
    return made


def _probe(observer: Any) -> Probe:
    return Probe(
        kind=type(observer),
        dtype=getattr(observer, "dtype", None),
        is_dynamic=bool(getattr(observer, "is_dynamic", False)),
        reuses_input=is_reuse_input(observer),
        fixed=is_fixed_qparams(observer),
    )


def _bias_dtype(qconfig: QConfig) -> torch.dtype:
    """float16 or bfloat16 when activation and weight are statically of that dtype, else float32."""
    if qconfig.activation is None or qconfig.weight is None:
        return torch.float32
    activation, weight = _probe(qconfig.activation()), _probe(qconfig.weight())
    dtype, same = activation.dtype, activation.dtype == weight.dtype
    if dtype is not None and same and is_narrow_float(dtype) and not activation.is_dynamic:
        return dtype
    return torch.float32
