"""Builds the report from the plan and what the later steps recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx, nn

from backquant.backend_config import BackendConfig
from backquant.convert import Measured
from backquant.graph import Provenance, Scope
from backquant.lower import KernelUse, QuantizedModel
from backquant.match.names import pattern_text
from backquant.match.plan import Decision, Plan, Reason, TensorAsk
from backquant.prepare import SiteTable
from backquant.report.model import ReasonRow, Report, Row

__all__ = ["ReportSource", "build_report"]


@dataclass(frozen=True)
class ReportSource:
    """What is known about a model at some step; later steps fill in more.

    ``module`` is the fused float graph that ``plan`` speaks about.
    """

    plan: Plan
    backend_config: BackendConfig
    module: fx.GraphModule
    scopes: Mapping[str, Scope] = field(default_factory=dict)
    provenance: Provenance = field(default_factory=Provenance)
    multiply_adds: Mapping[str, int] = field(default_factory=dict)
    sites: SiteTable | None = None
    qparams: Mapping[str, Measured] = field(default_factory=dict)
    engine: str = ""
    kernels: Sequence[KernelUse] = ()
    left_in_float: Sequence[Reason] = ()
    unseen: Sequence[str] = ()
    float_bytes: int = 0
    quantized_bytes: int = 0

    def lowered(
        self, model: nn.Module, quantized: QuantizedModel, unseen: Sequence[Any]
    ) -> ReportSource:
        """The same with what the lowering recorded."""
        return replace(
            self,
            engine="" if quantized.engine is None else quantized.engine.describe(),
            kernels=quantized.kernels,
            left_in_float=quantized.left_in_float,
            unseen=tuple(f"the observer of {item.value!r} saw no data" for item in unseen),
            float_bytes=_bytes(model),
            quantized_bytes=_bytes(quantized),
        )


def _bytes(module: nn.Module) -> int:
    """Bytes of parameters and buffers, each tensor once."""
    tensors = {t.data_ptr(): t for t in (*module.parameters(), *module.buffers()) if t.numel()}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def build_report(source: ReportSource) -> Report:
    """One row per operator of the plan, with everything that ``source`` knows about it.

    >>> gm = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    >>> build_report(ReportSource(Plan("x86"), BackendConfig("x86"), gm)).rows
    ()
    """
    return _Builder(source).report()


class _Builder:
    """The lookups that rows share."""

    def __init__(self, source: ReportSource) -> None:
        self._source = source
        self._entries = source.backend_config.configs
        self._nodes = {node.name: node for node in source.module.graph.nodes}
        self._kernel_of = {name: use.kernel for use in source.kernels for name in use.nodes}
        self._observers: dict[str, list[str]] = {}
        self._output_qparams: dict[str, str] = {}
        if source.sites is not None:
            self._read_sites(source.sites)

    def report(self) -> Report:
        source, plan = self._source, self._source.plan
        return Report(
            backend=source.backend_config.name or "unnamed backend",
            engine=source.engine,
            rows=tuple(self._row(decision) for decision in plan.decisions.values()),
            unused_rules=tuple(map(str, plan.unused_rules)),
            notes=(*plan.notes, *source.unseen),
            unreached_entries=tuple(self._pattern(i) for i in plan.unreached_entries),
            unlowered=tuple(_reason_row(reason, reason.node) for reason in source.left_in_float),
            float_bytes=source.float_bytes,
            quantized_bytes=source.quantized_bytes,
        )

    def _pattern(self, entry: int) -> str:
        return pattern_text(self._entries[entry].normal_pattern)

    def _row(self, decision: Decision) -> Row:
        plan = self._source.plan
        match = None if decision.match is None else plan.matches[decision.match]
        reasons = tuple(_reason_row(reason, reason.place) for reason in decision.reasons)
        return Row(
            node=decision.node,
            operator=decision.operator,
            module_path=decision.module_path,
            outcome=decision.outcome.value,
            inputs=tuple(node.name for node in self._nodes[decision.node].all_input_nodes),
            entry="" if match is None else match.pattern,
            dtype_config=self._dtype_config(decision),
            rule="" if decision.rule is None else str(decision.rule),
            asked=_asked(decision),
            observers=tuple(self._observers.get(decision.node, ())),
            qparams=self._output_qparams.get(decision.node, ""),
            kernel=self._kernel_of.get(decision.node, ""),
            fused=self._fused(decision.node),
            multiply_adds=self._source.multiply_adds.get(decision.node, 0),
            reasons=reasons,
        )

    def _fused(self, node: str) -> tuple[str, ...]:
        """What became ``node``: paths of modules, names of other nodes; nothing if only itself did."""
        origins = self._source.provenance.origins(node)
        return () if origins == (node,) else tuple(map(self._origin, origins))

    def _origin(self, name: str) -> str:
        scope = self._source.scopes.get(name)
        return scope.path if scope is not None and _is_call_of(scope.path, name) else name

    def _dtype_config(self, decision: Decision) -> str:
        if decision.match is None or decision.dtype_config is None:
            return ""
        match = self._source.plan.matches[decision.match]
        config = self._entries[match.entry].dtype_configs[decision.dtype_config]
        parts = {
            "input": config.input_dtype,
            "output": config.output_dtype,
            "weight": config.weight_dtype,
            "bias": config.bias_dtype,
        }
        text = ", ".join(f"{role} {_dtype(dtype)}" for role, dtype in parts.items() if dtype)
        return text + (", dynamic" if config.is_dynamic else "")

    def _read_sites(self, sites: SiteTable) -> None:
        groups = sites.groups()
        values = {site.name: self._value(site.name, sites) for site in sites.sites}
        for site in sites.sites:
            others = [values[name] for name in groups[site.group] if name != site.name]
            shared = ", shared with " + ", ".join(dict.fromkeys(others)) if others else ""
            measured = self._source.qparams.get(site.name)
            if site.producer:
                self._observers.setdefault(site.producer, []).append(f"output{shared}")
                if measured is not None:
                    self._output_qparams[site.producer] = _qparams(measured)
            for reader in site.readers:
                text = f"{site.role.value} {values[site.name]!r}{shared}"
                self._observers.setdefault(reader, []).append(text)

    @staticmethod
    def _value(name: str, sites: SiteTable) -> str:
        """The node of the unobserved graph whose value a site observes."""
        value = sites[name].value
        while value in sites:
            value = sites[value].value
        return value


def _is_call_of(path: str, name: str) -> bool:
    """Whether ``torch.fx`` names a call of the module at ``path`` so: ``_0``, ``block_conv1_2``."""
    squeezed = [re.sub(r"[\W_]", "", text).lower() for text in (path, name)]
    return bool(path) and re.fullmatch(re.escape(squeezed[0]) + r"\d*", squeezed[1]) is not None


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _qparams(measured: Measured) -> str:
    if measured.scale is None or measured.zero_point is None:
        return ""
    if measured.axis is not None:
        return f"{_dtype(measured.dtype)}, {measured.scale.numel()} scales on axis {measured.axis}"
    return (
        f"{_dtype(measured.dtype)} [{measured.quant_min}, {measured.quant_max}], "
        f"scale {float(measured.scale):.6g}, zero point {int(measured.zero_point)}"
    )


def _ask(role: str, ask: TensorAsk | None) -> str:
    if ask is None:
        return ""
    text = f"{role} {_dtype(ask.dtype)}"
    if ask.quant_min is not None and ask.quant_max is not None:
        text += f" [{ask.quant_min}, {ask.quant_max}]"
    return f"{text} by {ask.observer}" + (", dynamic" if ask.is_dynamic else "")


def _asked(decision: Decision) -> str:
    parts = (_ask("activation", decision.asked_activation), _ask("weight", decision.asked_weight))
    return "; ".join(part for part in parts if part)


def _reason_row(reason: Reason, place: str) -> ReasonRow:
    return ReasonRow(reason.rule, reason.asked, reason.admitted, reason.fix, place)
