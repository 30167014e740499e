"""The quantizer itself: decisions of a plan as torchao's annotations. Imports torchao.

1. A site of ours (``backquant.prepare.sites``) is an output in torchao's terms, or one edge per reader.
2. Sites that share an observer are one group, whose first edge or node in torchao's order has the
   spec; the others refer to it. Nothing is shared implicitly.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from backquant.backend_config import BackendConfig
from backquant.dtypes import quantize_bounds, storage_dtype
from backquant.graph.shapes import GraphValues
from backquant.interop.respelled import respelled
from backquant.match import Plan, make_plan
from backquant.operators.equivalents import mapping_for_export, with_export_spellings
from backquant.prepare import ObserverSource, ObserverSpec, Site, SiteTable
from backquant.prepare.placement import observation_sites
from backquant.qconfig import QConfigMapping

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what torchao itself uses
    from torchao.quantization.pt2e import ObserverBase
    from torchao.quantization.pt2e.quantizer import (
        FixedQParamsQuantizationSpec,
        QuantizationAnnotation,
        QuantizationSpec,
        Quantizer,
        SharedQuantizationSpec,
    )


_KEY = "quantization_annotation"  # where torchao looks
_Place = Any  # a node (its output) or a pair of nodes (an edge)


class Measuring(ObserverBase):
    """An observer of ours with the attributes that ``convert_pt2e`` reads.

    >>> from backquant.observe import MinMaxObserver
    >>> observer = Measuring(MinMaxObserver(dtype=torch.quint8))
    >>> observer.dtype, observer.quant_min, observer.quant_max
    (torch.uint8, 0, 255)
    """

    def __init__(self, observer: nn.Module) -> None:
        own: Any = observer
        stored = _stored(own.dtype)
        super().__init__(stored, bool(getattr(own, "is_dynamic", False)))
        self.observer = observer
        self.qscheme = getattr(own, "qscheme", None) or torch.per_tensor_affine
        self.ch_axis = getattr(own, "ch_axis", 0)
        self.eps = float(getattr(own, "eps", torch.finfo(torch.float32).eps))
        self.quant_min, self.quant_max = _bounds(own)

    def forward(self, x: torch.Tensor) -> Any:
        """What the observer gives: ``x``, or a fake-quantized ``x``."""
        return self.observer(x)

    def calculate_qparams(self, **_: Any) -> Any:
        """The observer's scale and zero point."""
        own: Any = self.observer
        return own.calculate_qparams()


def _stored(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else storage_dtype(dtype)


def _bounds(observer: Any) -> tuple[int | None, int | None]:
    low, high = getattr(observer, "quant_min", None), getattr(observer, "quant_max", None)
    if low is not None and high is not None:
        return int(low), int(high)
    if observer.dtype.is_floating_point:
        return None, None
    return quantize_bounds(observer.dtype)


class _Constructor:
    """What torchao calls for an observer: ``with_args(...)()``. Its arguments are those of the spec."""

    __name__ = "Measuring"

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make = make

    def with_args(self, **_: Any) -> _Constructor:
        return self

    def __call__(self) -> Measuring:
        return Measuring(self._make())

    def __deepcopy__(self, memo: Any) -> _Constructor:
        return self  # torchao copies the fields of a spec


class PlanQuantizer(Quantizer):
    """See ``backquant.as_quantizer``. ``plan`` is that of the model annotated last."""

    def __init__(self, backend_config: BackendConfig, qconfig_mapping: QConfigMapping) -> None:
        super().__init__()
        self._backend = with_export_spellings(backend_config)
        self._mapping = mapping_for_export(qconfig_mapping)
        self._source = ObserverSource(self._backend, self._mapping)
        self.plan: Plan | None = None

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        """Put torchao's annotations on the nodes that the plan quantizes."""
        spelled = respelled(model)
        values = GraphValues.traced(model)
        plan = make_plan(
            spelled.module, spelled.scopes, self._backend, self._mapping, values=values
        )
        self.plan, table = self._placed(spelled.module, plan)
        nodes = {node.name: node for node in model.graph.nodes}
        order = {node: position for position, node in enumerate(model.graph.nodes)}
        for head, names in table.groups().items():
            places = [place for name in names for place in _places(table[name], table, nodes)]
            spec = self._spec(table[head].spec)
            self._share(sorted(places, key=lambda place: _turn(place, order)), spec)
        self._weights(spelled.weights, nodes)
        return model

    def validate(self, model: fx.GraphModule) -> None:
        """Nothing is left to check: the plan holds only what the backend admits."""

    def _placed(self, module: fx.GraphModule, plan: Plan) -> tuple[Plan, SiteTable]:
        """The sites, once no match is refused for want of an observer to share."""
        while True:
            table = observation_sites(module, plan, self._backend, self._mapping)
            if not table.refused:
                return plan, table
            plan = plan.refuse(table.refused)

    def _weights(self, weights: Mapping[str, str], nodes: Mapping[str, fx.Node]) -> None:
        """Weights of modules have no sites: a reference module measures its own."""
        assert self.plan is not None
        for match in self.plan.matches:
            decision = self.plan.decisions[match.root]
            spec = ObserverSpec(decision.rule, "weight")
            for name in match.carriers:
                is_weight = decision.quantized and name in weights
                if is_weight and self._source.probe(spec).observable:
                    reader = nodes[name]
                    _annotation(reader).input_qspec_map[nodes[weights[name]]] = self._spec(spec)

    def _share(self, places: list[_Place], spec: Any) -> None:
        for place in places:
            shared = spec if place == places[0] else SharedQuantizationSpec(places[0])
            if isinstance(place, tuple):
                _annotation(place[1]).input_qspec_map[place[0]] = shared
            else:
                _annotation(place).output_qspec = shared

    def _spec(self, spec: ObserverSpec) -> Any:
        made: Any = self._source.make(spec)
        low, high = _bounds(made)
        common = {
            "dtype": _stored(made.dtype),
            "quant_min": low,
            "quant_max": high,
            "qscheme": getattr(made, "qscheme", None),
            "is_dynamic": bool(getattr(made, "is_dynamic", False)),
        }
        if self._source.probe(spec).fixed:
            scale, zero_point = made.calculate_qparams()
            return FixedQParamsQuantizationSpec(
                scale=float(scale), zero_point=int(zero_point), **common
            )
        return QuantizationSpec(
            observer_or_fake_quant_ctr=_Constructor(lambda: self._source.make(spec)),
            ch_axis=getattr(made, "ch_axis", None),
            **common,
        )


def _places(site: Site, table: SiteTable, nodes: dict[str, fx.Node]) -> list[_Place]:
    if site.producer:
        return [nodes[site.producer]]
    value = site.value
    while value in table:  # a value that is needed in two dtypes
        value = table[value].value
    return [(nodes[value], nodes[reader]) for reader in site.readers]


def _turn(place: _Place, order: dict[fx.Node, int]) -> tuple[int, int, int]:
    """When torchao comes by: nodes in graph order, of each the inputs first."""
    if isinstance(place, tuple):
        return order[place[1]], 0, list(place[1].all_input_nodes).index(place[0])
    return order[place], 1, 0


def _annotation(node: fx.Node) -> Any:
    return node.meta.setdefault(
        _KEY, QuantizationAnnotation(allow_implicit_sharing=False, _annotated=True)
    )
