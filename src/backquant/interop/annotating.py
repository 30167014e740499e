"""Decisions of a plan as annotations of torchao's: the graph respelled, the quantizer. Imports torchao."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from backquant.backend_config import BackendConfig
from backquant.dtypes import quantize_bounds, storage_dtype
from backquant.graph import Scope
from backquant.graph.export.tidy import place_of
from backquant.graph.shapes import GraphValues
from backquant.match import Plan, make_plan
from backquant.operators.aten import AtenSpeller
from backquant.operators.equivalents import mapping_for_export, with_export_spellings
from backquant.operators.index import find
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


# An aten graph in the spelling of backends' entries, node for node.
#
# Unlike the lifting of ``backquant.graph.export`` this keeps every node and its name, so that what is
# decided about a node holds for the node of that name in the aten graph.


@dataclass(frozen=True)
class Respelled:
    """``module`` has the nodes of the aten graph by their names; ``weights`` the name of the node that
    holds the weight of a called module, by the name of the call."""

    module: fx.GraphModule
    scopes: dict[str, Scope] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)


def respelled(module: fx.GraphModule) -> Respelled:
    """A copy of ``module`` with modules, functions and methods for its overloads.

    The copy shares the tensors; ``module`` stays as it is.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> found = respelled(torch.export.export(model, (torch.zeros(1, 2),)).module())
    >>> [(node.name, node.target) for node in found.module.graph.nodes if node.op == "call_module"]
    [('linear', '_module_linear'), ('relu', '_module_relu')]
    >>> found.weights
    {'linear': '_0_weight'}
    """
    return _Writer(module).run()


class _Writer:
    """Writes the copy node by node."""

    def __init__(self, source: fx.GraphModule) -> None:
        self._source = source
        self._graph = fx.Graph()
        self._made: dict[fx.Node, fx.Node] = {}
        self._speller = AtenSpeller()
        self._values: dict[str, Any] = {}
        self._scopes: dict[str, Scope] = {}
        self._weights: dict[str, str] = {}
        calls = (node for node in source.graph.nodes if node.op == "call_function")
        self._operators = Counter(place_of(node).call for node in calls)

    def run(self) -> Respelled:
        """Make the copy."""
        for node in self._source.graph.nodes:
            if node.op == "call_module" and not node.users:
                continue  # checks of the arguments
            self._made[node] = self._write(node)
            self._scopes[self._made[node].name] = _scope(node)
        for made in reversed(list(self._graph.nodes)):
            if made.op == "get_attr" and not made.users:
                self._graph.erase_node(made)
            elif made.op in ("get_attr", "call_module") and made.target not in self._values:
                self._values[made.target] = attrgetter(made.target)(self._source)
        copied = fx.GraphModule(self._values, self._graph)
        return Respelled(copied, self._scopes, self._weights)

    def _write(self, node: fx.Node) -> fx.Node:
        if node.op != "call_function" or not _computes_floats(node):
            return self._graph.node_copy(node, self._made.__getitem__)
        module = self._module(node)
        if module is not None:
            path = f"_module_{node.name}"
            self._values[path] = module
            value = self._made[_input(node)]
            made = self._graph.create_node("call_module", path, (value,), {}, node.name)
        else:
            call = self._speller.call(node.target, node.args, node.kwargs)
            if call is None:
                return self._graph.node_copy(node, self._made.__getitem__)
            args, kwargs = fx.node.map_arg(
                (tuple(call.args), dict(call.kwargs)), self._made.__getitem__
            )
            made = self._graph.create_node(call.kind, call.target, args, kwargs, node.name)
        made.meta = dict(node.meta)
        return made

    def _module(self, node: fx.Node) -> nn.Module | None:
        """The module that ``node`` is the only operator of, if it is one of PyTorch's."""
        place = place_of(node)
        if not place.cls.startswith("torch.nn.modules.") or self._operators[place.call] != 1:
            return None
        if not node.args or not isinstance(node.args[0], fx.Node):
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._known)
        module = self._speller.module(node.target, args, kwargs)
        if module is None or type(module) is not _scope(node).module_type:
            return None
        weight = _weight(node)
        if weight is not None:
            self._weights[node.name] = weight.name
        return module.eval()

    def _known(self, node: fx.Node) -> Any:
        return attrgetter(str(node.target))(self._source) if node.op == "get_attr" else node


def _input(node: fx.Node) -> fx.Node:
    """What a module is called with; the weight of ``aten.embedding`` comes before it."""
    value = node.args[1 if _is_lookup(node) else 0]
    assert isinstance(value, fx.Node)
    return value


def _weight(node: fx.Node) -> fx.Node | None:
    known = find(node.target)
    if known is None or not known.is_weighted:
        return None
    index = known.aten_weight_index
    index = known.weight_index if index is None else index
    value = node.args[index] if index is not None and index < len(node.args) else None
    return value if isinstance(value, fx.Node) else None


def _is_lookup(node: fx.Node) -> bool:
    """Whether its other argument than the weight is indices, which only select."""
    known = find(node.target)
    return known is not None and known.family == "embedding"


def _computes_floats(node: fx.Node) -> bool:
    """Whether floats are computed from floats: no mask, no index."""
    values = [node.meta.get("val")]
    if not _is_lookup(node):
        values += [source.meta.get("val") for source in node.all_input_nodes]
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return bool(tensors) and all(tensor.is_floating_point() for tensor in tensors)


def _scope(node: fx.Node) -> Scope:
    place = place_of(node)
    owner, _, name = place.cls.rpartition(".")
    found = getattr(sys.modules.get(owner), name, None) if owner else None
    return Scope(place.path, found if place.path and isinstance(found, type) else None)


# The quantizer itself: decisions of a plan as torchao's annotations. Imports torchao.
#
# 1. A site of ours (``backquant.prepare.sites``) is an output in torchao's terms, or one edge per reader.
# 2. Sites that share an observer are one group, whose first edge or node in torchao's order has the
#    spec; the others refer to it. Nothing is shared implicitly.

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
