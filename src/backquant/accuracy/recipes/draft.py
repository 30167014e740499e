"""A calibrated model with the changes that recipes choose; nothing is changed in the model itself until it is
converted.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from backquant.accuracy.rounding import Grid
from backquant.accuracy.twin import Twin, Walk
from backquant.convert import ConvertRequest, ReferenceModel, convert_to_reference, reference_state
from backquant.dtypes import ObservedQParams, block_of
from backquant.graph import GraphEditor, call_before, get_module, rebuilt, set_module, shallow_copy
from backquant.graph.edit import weighted_part
from backquant.match.plan import Decision, Outcome, Reason
from backquant.observe import FixedQParamsObserver, HistogramObserver, PlaceholderObserver
from backquant.prepare import PreparedModule, SiteTable, prepared_state, with_state
from backquant.reason_codes import ReasonCode


@dataclass(frozen=True)
class Change:
    """One thing that a step of a recipe changes. A field that is ``None`` changes nothing.

    ``place``: the path of a module whose ``weight``, ``bias`` or weight ``qparams`` (PyTorch's dict) change;
    or the name of the observer of a value whose ``activation`` qparams change (of several that share qparams,
    the first).

    ``divided``: what the output channels of the module are divided by; of an observer, what the last axis of
    the observed value is divided by, by a multiplication before it. ``multiplied``: what the weights of the
    module's input channels are multiplied by. The two cancel each other between neighbours. They are applied
    in float, before rounding.
    """

    place: str
    weight: torch.Tensor | None = None
    qparams: Mapping[str, Any] | None = None
    bias: torch.Tensor | None = None
    activation: ObservedQParams | None = None
    divided: torch.Tensor | None = None
    multiplied: torch.Tensor | None = None

    @property
    def in_float(self) -> bool:
        """Whether it changes the float model."""
        return self.divided is not None or self.multiplied is not None


#: Changes that make sense together only.
Together: TypeAlias = tuple[Change, ...]


@dataclass(frozen=True)
class Draft:
    """A calibrated model, which stays as it is, and changes to it by place.

    ``searched``: the ranges that its histograms give, by the observer, where they were searched before.
    """

    prepared: PreparedModule
    request: ConvertRequest
    changes: Mapping[str, Change] = field(default_factory=dict)
    searched: Mapping[str, ObservedQParams] = field(default_factory=dict)

    @property
    def only_weights(self) -> bool:
        """Whether no activation has a scale that was measured."""
        names = (site.name for site in prepared_state(self.prepared).sites.sites)
        return all(isinstance(get_module(self.prepared, n), PlaceholderObserver) for n in names)

    def settled(self) -> Draft:
        """The draft with the ranges of its histograms searched, so that later conversions need not search
        them again.
        """
        found = reference_state(self.reference()).qparams
        histograms = {
            head: found[head]
            for head in prepared_state(self.prepared).sites.groups()
            if head in found and type(get_module(self.prepared, head)) is HistogramObserver
        }
        return replace(self, searched=histograms)

    def changed(self, changes: Iterable[Change]) -> Draft:
        """The draft with these changes, too. Of two changes at one place the later one counts. Where a float
        weight changes, what was chosen for the rounding of the weight before is dropped.
        """
        changes, found, prepared = list(changes), dict(self.changes), self.prepared
        if any(change.in_float for change in changes):
            prepared = _copied(prepared)
        for change in changes:
            if change.in_float:
                _rescale(prepared, change)
                _forget(found, change)
                continue
            before = found.get(change.place, Change(change.place))
            said = {name: value for name, value in vars(change).items() if value is not None}
            found[change.place] = replace(before, **said)
        return replace(self, prepared=prepared, changes=found)

    def prepared_model(self) -> PreparedModule:
        """A copy of the calibrated model with the changes applied."""
        made = _copied(self.prepared)
        groups = prepared_state(made).sites.groups()
        for place, change in self.changes.items():
            if change.activation is not None:
                observer = _fixed(change.activation)
                for name in groups[place]:
                    set_module(made, name, observer)
            else:
                _change_weights(get_module(made, place), change)
        return made

    def conversion(self) -> ConvertRequest:
        """The arguments of its conversion."""
        chosen = {c.place: c.qparams for c in self.changes.values() if c.qparams is not None}
        return replace(self.request, weight_qparams=chosen)

    def reference(self) -> ReferenceModel:
        """The reference model that it is converted to."""
        made = self.prepared_model()
        groups = prepared_state(made).sites.groups()
        for head, found in self.searched.items():
            if head not in self.changes:
                observer = _fixed(found)
                for name in groups[head]:
                    set_module(made, name, observer)
        return convert_to_reference(made, request=self.conversion())

    def twin(self) -> Twin:
        """The float model and the reference model of this draft as one pair, to run them node by node."""
        return Twin(self.prepared, self.reference())


def _copied(prepared: PreparedModule) -> PreparedModule:
    return rebuilt(PreparedModule, prepared, shallow_copy(prepared))


def _forget(found: dict[str, Change], change: Change) -> None:
    """Drop what was chosen for weights that have changed since."""
    before = found.pop(change.place, None)
    if before is not None and change.divided is None:
        found[change.place] = replace(before, weight=None, qparams=None)


def _rescale(prepared: PreparedModule, change: Change) -> None:
    if change.divided is not None and change.place in prepared_state(prepared).sites:
        insert_product(prepared, change.place, change.divided.reciprocal())
        return
    part: Any = weighted_part(get_module(prepared, change.place))
    if change.divided is not None:
        for name in ("weight", "bias"):
            tensor = part._parameters.get(name)
            if tensor is not None:
                by = change.divided.reshape(-1, *[1] * (tensor.dim() - 1))
                part._parameters[name] = nn.Parameter(tensor.detach() / by, requires_grad=False)
    if change.multiplied is not None:
        weight, groups = part.weight.detach(), int(getattr(part, "groups", 1))
        inputs = change.multiplied.reshape(groups, 1, weight.shape[1], 1)
        rows = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1) * inputs
        part._parameters["weight"] = nn.Parameter(rows.reshape(weight.shape), requires_grad=False)


def _fixed(found: ObservedQParams) -> FixedQParamsObserver:
    assert found.scale is not None and found.zero_point is not None
    return FixedQParamsObserver(
        float(found.scale),
        int(found.zero_point),
        dtype=found.dtype,
        qscheme=found.qscheme or torch.per_tensor_affine,
        quant_min=found.quant_min,
        quant_max=found.quant_max,
    )


def _change_weights(module: nn.Module, change: Change) -> None:
    part = weighted_part(module)
    for name in ("weight", "bias"):
        tensor = getattr(change, name)
        if tensor is not None:
            part._parameters[name] = nn.Parameter(tensor, requires_grad=False)


# A multiplication by a constant between a value and its observer: in float, before quantization.
def insert_product(prepared: PreparedModule, site: str, factors: torch.Tensor) -> None:
    """Multiply the last axis of the value that ``site`` observes by ``factors``, in place. Only the observer
    reads the product; the other readers keep the value.
    """
    state = prepared_state(prepared)
    editor = GraphEditor(prepared, state.provenance.copy())
    observer = next(node for node in prepared.graph.nodes if node.name == site)
    value = observer.all_input_nodes[0]
    constant = editor.read_buffer(observer, editor.names.take(f"{site}_factors_"), factors)
    product = call_before(observer, "call_function", operator.mul, (value, constant))
    observer.replace_input_with(value, product)
    for new in (constant, product):
        editor.provenance.record(new.name, (value.name,))
    editor.finish()
    sites = tuple(
        replace(each, value=product.name) if each.name == site else each
        for each in state.sites.sites
    )
    before = state.plan.decisions.get(value.name)
    path = "" if before is None else before.module_path
    why = Reason(
        product.name,
        ReasonCode.RECIPE,
        f"a product of {value.name} with one factor for each channel",
        "float",
        place="recipe, step products",
    )
    own = Decision(product.name, "operator.mul", path, Outcome.FLOAT, reasons=(why,))
    decisions: dict[str, Decision] = {}
    for name, decision in state.plan.decisions.items():
        decisions[name] = decision
        if name == value.name:
            decisions[product.name] = own
    plan = replace(state.plan, decisions=decisions)
    sites_of = SiteTable(sites, state.sites.refused)
    with_state(prepared, replace(state, plan=plan, sites=sites_of, provenance=editor.provenance))


# The quantized layers whose weights a recipe may change: their float and reference modules, and their
# inputs.

_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Layer:
    """A quantized linear layer or convolution.

    ``nodes``: its calls. ``float_part``: the module with the float weight. ``reference``: the module with the
    integer weight.
    """

    path: str
    nodes: tuple[fx.Node, ...]
    float_part: Any
    reference: Any

    @property
    def groups(self) -> int:
        """The groups of a convolution; 1 for a linear layer."""
        return int(getattr(self.float_part, "groups", 1))

    @property
    def transposed(self) -> bool:
        """Whether it is a transposed convolution."""
        return isinstance(self.float_part, _TRANSPOSED)

    @property
    def weight(self) -> torch.Tensor:
        """The float weight."""
        found: torch.Tensor = self.float_part.weight.detach()
        return found

    @property
    def inputs(self) -> int:
        """How many values one output is a sum of."""
        return self.weight[0].numel()

    def qparams(self) -> dict[str, Any]:
        """The weight qparams of the reference module, as PyTorch's dict."""
        own = self.reference
        found = {
            "qscheme": own.weight_qscheme,
            "dtype": own.weight_dtype,
            "scale": own.weight_scale,
            "zero_point": own.weight_zero_point,
            "axis": own.weight_axis,
            "quant_min": own.weight_quant_min,
            "quant_max": own.weight_quant_max,
        }
        if own.weight_scale.dim() > 1:
            del found["axis"]
        return found

    def grid(self) -> Grid:
        """The scales and zero points that the weight is rounded to, in the shape of ``columns``."""
        own, shape = self.reference, self.weight.shape
        scale, zero_point = own.weight_scale.float(), own.weight_zero_point.float()
        if scale.dim() == 1:
            spread = [1] * len(shape)
            spread[own.weight_axis] = -1
            scale, zero_point = scale.reshape(spread), zero_point.reshape(spread)
        elif scale.dim() > 1:
            for axis, size in enumerate(block_of(shape, scale.shape) or ()):
                scale = scale.repeat_interleave(size, axis).narrow(axis, 0, shape[axis])
                zero_point = zero_point.repeat_interleave(size, axis).narrow(axis, 0, shape[axis])
        rows = (self.groups, shape[0] // self.groups, -1)
        scale, zero_point = (t.expand(shape).reshape(rows) for t in (scale, zero_point))
        return Grid(scale, zero_point, own.weight_quant_min, own.weight_quant_max)


def layers_of(twin: Twin, *, transposed: bool = False) -> Iterator[Layer]:
    """The layers whose module is quantized at each of its calls, in the order of the graph.

    ``transposed``: whether transposed convolutions are among them.
    """
    return _quantized(twin, (*_KINDS, *_TRANSPOSED) if transposed else _KINDS)


def tables_of(twin: Twin) -> Iterator[Layer]:
    """The embeddings that are quantized at each of their calls; a row of their weight is one of the table."""
    return _quantized(twin, (nn.Embedding, nn.EmbeddingBag))


def _quantized(twin: Twin, kinds: tuple[type[nn.Module], ...]) -> Iterator[Layer]:
    calls: dict[str, list[fx.Node]] = {}
    for node in twin.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    for path, nodes in calls.items():
        others = [twin.twins.get(node.name) for node in nodes]
        if any(node.name not in twin.of for node in nodes) or any(
            other is None or other.target != path for other in others
        ):
            continue
        part = weighted_part(get_module(twin.float_graph, path))
        reference: Any = weighted_part(get_module(twin.reference, path))
        scale = getattr(reference, "weight_scale", None)
        if not isinstance(part, kinds) or not isinstance(scale, torch.Tensor):
            continue
        if not reference.weight.is_floating_point() and "weight" in part._parameters:
            yield Layer(path, tuple(nodes), part, reference)


def input_of(walk: Walk, node: fx.Node) -> Any:
    """What a layer reads in a run: its first argument."""
    args, kwargs = walk.inputs_of(node)
    return args[0] if args else next(iter(kwargs.values()))
