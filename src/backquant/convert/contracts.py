"""What the steps of conversion require and ensure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set

from torch import fx, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from backquant.backend_config import get_root_module_to_quantized_reference_module
from backquant.convert.dialects import is_dequantize
from backquant.convert.state import Conversion, ConvertRequest, ReferenceModel, reference_state
from backquant.dtypes import ObservedQParams, find_dtype
from backquant.graph import Breach, get_module
from backquant.graph.edit import weighted_part
from backquant.match.plan import MatchKind
from backquant.prepare import PreparedModule


def observers_are_called(prepared: fx.GraphModule, work: Conversion) -> Iterator[Breach]:
    """Each site of the record is a call of its observer."""
    for site in work.prepared.sites.sites:
        node = work.nodes.get(site.name)
        if node is None or node.op != "call_module":
            yield Breach(site.name, f"a call of the observer of {site.value}")


def groups_are_measured(
    found: Mapping[str, ObservedQParams], *arguments: object
) -> Iterator[Breach]:
    """Each group of sites has qparams. (Two steps ensure this; both take the conversion as their last
    argument.)"""
    work = arguments[-1]
    assert isinstance(work, Conversion)
    for head in work.prepared.sites.groups():
        if head not in found:
            yield Breach(head, "scale and zero point of its group")


def needed_are_measured(work: Conversion, needed: Set[str], skipped: Set[str]) -> Iterator[Breach]:
    """What becomes a quantize node is a site of the record, and has qparams."""
    sites = work.prepared.sites
    for name in sorted(needed - skipped):
        if name not in sites or sites[name].group not in work.qparams:
            yield Breach(name, "an observed value with scale and zero point")


def activations_are_quantized(
    _: None, work: Conversion, needed: Set[str], skipped: Set[str]
) -> Iterator[Breach]:
    """No observer is called; each value that is needed quantized is dequantized for its readers."""
    nodes = set(work.module.graph.nodes)
    sites = work.prepared.sites
    for node in work.module.graph.nodes:
        if node.op == "call_module" and node.target in sites:
            yield Breach(node.name, "no call of an observer")
    for site in sites.sites:
        wanted = site.name in needed and site.name not in skipped
        if wanted and work.dequantized.get(site.name) not in nodes:
            yield Breach(site.value, f"quantize and dequantize nodes in the place of {site.name}")


def weights_are_integers(_: None, work: Conversion) -> Iterator[Breach]:
    """A quantized call calls no module of which the backend has a reference class; none is trained."""
    references = get_root_module_to_quantized_reference_module(work.prepared.backend_config)
    for match in work.plan.matches:
        if match.kind is not MatchKind.PATTERN:
            continue
        quantized = work.quantized(match.anchor) and _stores_weights(work, match.root)
        for name in match.carriers:
            node = work.nodes[name]
            if node.op != "call_module":
                continue
            module = get_module(work.module, str(node.target))
            if hasattr(module, "weight_fake_quant"):
                yield Breach(name, f"no training module, and finds {type(module).__name__}")
            part = weighted_part(module)
            if quantized and _has_reference(part, references):
                yield Breach(name, f"a reference module of {type(part).__name__}")


def _stores_weights(work: Conversion, root: str) -> bool:
    asked = work.plan.decisions[root].asked_weight
    row = None if asked is None else find_dtype(asked.dtype)
    return row is not None and row.is_stored


def _has_reference(module: nn.Module, references: Mapping[type, type]) -> bool:
    own = type_before_parametrizations(module)
    return references.get(own, own) is not own


def standalone_are_converted(
    _: None, work: Conversion, convert: Callable[..., ReferenceModel]
) -> Iterator[Breach]:
    """No prepared module is called."""
    for node in work.module.graph.nodes:
        if node.op == "call_module" and isinstance(
            get_module(work.module, str(node.target)), PreparedModule
        ):
            yield Breach(node.name, "a converted standalone module")


def inputs_are_dequantized(_: Set[str], work: Conversion) -> Iterator[Breach]:
    """Inputs that arrive quantized are read by dequantize nodes only."""
    inputs = [node for node in work.module.graph.nodes if node.op == "placeholder"]
    for index in work.inputs:
        for reader in inputs[index].users:
            if not is_dequantize(reader):
                yield Breach(reader.name, f"to read the input {inputs[index].name} dequantized")


def record_is_complete(
    result: ReferenceModel, work: Conversion, needed: Set[str], request: ConvertRequest
) -> Iterator[Breach]:
    """No observer is left, and each quantized value of the record has qparams."""
    for site in work.prepared.sites.sites:
        if site.name in result._modules:
            yield Breach(site.name, "no observer in the reference model")
    state = reference_state(result)
    for site in state.sites.sites:
        if site.name not in state.qparams:
            yield Breach(site.value, "scale and zero point in the record")
