"""Weighted modules become reference modules with integer weights.

1. The weight's observer comes from the QConfig of the module's rule and sees the weight once; a QAT
   module's own fake-quantizer is used instead, and sees the trained weight once more (as PyTorch's).
2. Of a fused module only its first part is replaced; the activation stays where it is.
3. A module that is called several times is converted once. Calls that stay in float, or that ask for
   another observer, keep or get a module of their own: the float calls the original.
4. Weights that are tied in the float model share one integer tensor if their qparams are equal.
5. QAT modules that are not quantized become float modules.
6. Qparams that somebody chose for the weight at a path (``ConvertRequest.weight_qparams``) are taken for it;
   so are biases.

The qparams of small weights are calculated together: same bits, less time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from backquant.backend_config import get_root_module_to_quantized_reference_module
from backquant.convert.contracts import weights_are_integers
from backquant.convert.dialects import check_narrow_float, without_uint16
from backquant.convert.fold import Constants
from backquant.convert.hardware import WeightMaker, weight_maker
from backquant.convert.state import Conversion, ReferenceModel, reference_state
from backquant.dtypes import (
    ObservedQParams,
    TensorQParams,
    block_of,
    find_dtype,
    is_narrow_float,
    is_scaled_float,
    quantize_tensor,
)
from backquant.errors import BackquantError, ConfigError
from backquant.graph import (
    contract,
    get_module,
    register_quantized_decomposed,
    set_module,
)
from backquant.graph.edit import weighted_part
from backquant.match.plan import Match, MatchKind
from backquant.observe.protocol import measure, qparam_dict
from backquant.observe.together import weights_together
from backquant.prepare import ObserverSpec, PreparedModule, Role, prepared_state

# The qparams of small weights, by observer and the id of the float weight.
_Known = dict[tuple[ObserverSpec, int], dict[str, Any]]


@contract(ensures=[weights_are_integers])
def convert_weighted_modules(work: Conversion) -> None:
    """Replace the modules of all quantized matches in ``work.module``.

    Raises ConfigError when a reference class has no ``from_float``.
    """
    references = get_root_module_to_quantized_reference_module(work.prepared.backend_config)
    quantized = _quantized_calls(work)
    calls: dict[str, list[fx.Node]] = {}
    of_modules = {m.anchor for m in work.plan.matches if m.kind is not MatchKind.PATTERN}
    for node in work.module.graph.nodes:
        planned = node.name in work.plan.decisions and node.name not in of_modules
        if node.op == "call_module" and planned:
            calls.setdefault(str(node.target), []).append(node)
    variants: dict[str, dict[Any, list[fx.Node]]] = {}
    for path, nodes in calls.items():
        for node in nodes:
            variant = _variant(work, quantized.get(node.name))
            variants.setdefault(path, {}).setdefault(variant, []).append(node)
    made = ((match, weight_maker(work, match)) for match in quantized.values())
    makers = {name: maker for match, maker in made if maker for name in match.carriers}
    converter = _Converter(work, references, _known_qparams(work, variants), makers)
    for path, own in variants.items():
        converter.convert(path, own)


def _known_qparams(work: Conversion, variants: Mapping[str, Iterable[Any]]) -> _Known:
    """The qparams of small weights, all together; rule 1."""
    seen: dict[ObserverSpec, list[torch.Tensor]] = {}
    for path, specs in variants.items():
        module = get_module(work.module, path)
        if hasattr(module, "weight_fake_quant"):
            continue
        part = weighted_part(module)
        weight = getattr(part, "weight", None)  # a TorchScript module has no dict of parameters
        if isinstance(weight, nn.Parameter):
            for spec in specs:
                if spec is not None:
                    seen.setdefault(spec, []).append(weight)
    known: _Known = {}
    for spec, weights in seen.items():
        found = weights_together(partial(work.source.reused, spec), weights)
        known |= {(spec, weight): qparams for weight, qparams in found.items()}
    return known


def weight_scales(work: Conversion, match: Match) -> list[float]:
    """The scales that the weight of a match's module would get; none if it has no module."""
    spec = _weight_spec(work, match)
    roots = [work.nodes[name] for name in match.carriers]
    called = [root for root in roots if root.op == "call_module"]
    if not _requests_weight(work, spec):
        return []
    maker = weight_maker(work, match)
    return [scale for root in called for scale in _module_scales(work, root, spec, maker)]


def _module_scales(
    work: Conversion, root: fx.Node, spec: ObserverSpec, maker: WeightMaker | None
) -> list[float]:
    trained = get_module(work.module, str(root.target))
    plain = without_training(trained)
    part = weighted_part(plain)
    if not isinstance(getattr(part, "weight", None), torch.Tensor):
        return []
    chosen = work.request.weight_qparams.get(str(root.target))
    with torch.no_grad():
        qparams = dict(chosen or _weight_qparams(part, _observer_factory(work, trained, spec)))
    qparams = qparams if maker is None else maker(qparams)
    scale = qparams.get("scale")
    return [] if scale is None else [float(s) for s in torch.as_tensor(scale).flatten()]


def _quantized_calls(work: Conversion) -> dict[str, Match]:
    return {
        name: match
        for match in work.plan.matches
        if match.kind is MatchKind.PATTERN and work.quantized(match.anchor)
        for name in match.carriers
    }


def _variant(work: Conversion, match: Match | None) -> Any:
    """What tells the reference modules of several calls of a module apart: calls with the same share one.
    None: the call stays in float."""
    if match is None:
        return None
    spec = _weight_spec(work, match)
    return spec if _requests_weight(work, spec) else None


def _weight_spec(work: Conversion, match: Match) -> ObserverSpec:
    return ObserverSpec(work.plan.decisions[match.root].rule, "weight")


def _requests_weight(work: Conversion, spec: ObserverSpec) -> bool:
    row = find_dtype(work.source.probe(spec).dtype)
    return row is not None and row.is_stored


@dataclass
class _Converter:
    """``makers``: what gives the weights of a call the scales of the hardware. ``made``: reference modules
    by the float weight that they were made from."""

    work: Conversion
    references: dict[type[nn.Module], type[nn.Module]]
    known: _Known
    makers: Mapping[str, WeightMaker]
    made: dict[int, list[nn.Module]] = field(default_factory=dict)

    def convert(self, path: str, variants: dict[Any, list[fx.Node]]) -> None:
        """Replace the module at ``path``."""
        work = self.work
        trained = get_module(work.module, path)
        plain = without_training(trained)
        if plain is not trained:
            set_module(work.module, path, plain)
        fused = isinstance(plain, nn.Sequential) and _is_fused(plain, self.references)
        part = weighted_part(plain) if fused else plain
        reference = self.references.get(type_before_parametrizations(part))
        specs = [spec for spec in variants if spec is not None]
        if reference is None or not specs:
            return
        for position, spec in enumerate(specs):
            own = position == 0 and None not in variants
            target = path if own else _fresh_path(work, path)
            module = plain if own else copy.copy(plain)
            if not own:
                module._modules = dict(plain._modules)
                set_module(work.module, target, module)
                for node in variants[spec]:
                    node.target = target
            calls = (node.name for node in variants[spec])
            maker = next((self.makers[name] for name in calls if name in self.makers), None)
            chosen = work.request.weight_qparams.get(path)
            qparams = (
                partial(self._qparams, part, trained, spec, maker)
                if chosen is None
                else partial(_made, dict(chosen), maker)
            )
            swapped = _reference(path, part, reference, qparams)
            for name, buffer in swapped._buffers.items():
                swapped._buffers[name] = None if buffer is None else work.request.kept(buffer)
            self._tie(part, swapped)
            if path in work.request.biases:
                swapped._parameters["bias"] = nn.Parameter(
                    work.request.biases[path], requires_grad=False
                )
            set_module(work.module, target if part is plain else f"{target}.0", swapped)

    def _qparams(
        self, part: nn.Module, trained: nn.Module, spec: ObserverSpec, maker: WeightMaker | None
    ) -> dict[str, Any]:
        known = self.known.get((spec, id(part._parameters.get("weight"))))
        found = known or _weight_qparams(part, _observer_factory(self.work, trained, spec))
        return _made(found, maker)

    def _tie(self, part: nn.Module, made: nn.Module) -> None:
        source = getattr(part, "weight", None)
        if not isinstance(source, torch.Tensor) or "weight" not in made._buffers:
            return
        twins = self.made.setdefault(id(source), [])
        for twin in twins:
            if _same_integers(twin, made):
                made._buffers["weight"] = twin._buffers["weight"]
                return
        twins.append(made)


def _made(qparams: dict[str, Any], maker: WeightMaker | None) -> dict[str, Any]:
    return qparams if maker is None else maker(qparams)


def _observer_factory(
    work: Conversion, trained: nn.Module, spec: ObserverSpec
) -> Callable[[], nn.Module]:
    """Rule 1."""
    own = getattr(trained, "weight_fake_quant", None)
    if own is not None:
        return lambda: copy.deepcopy(own)
    return lambda: work.source.reused(spec)


def _fresh_path(work: Conversion, path: str) -> str:
    number, candidate = 1, f"{path}_quantized"
    parent, _, _ = path.rpartition(".")
    owner = get_module(work.module, parent)
    while hasattr(owner, candidate.rpartition(".")[2]):
        number += 1
        candidate = f"{path}_quantized_{number}"
    return candidate


def without_training(module: nn.Module) -> nn.Module:
    """The float module of a QAT module; any other as it is.

    Raises ConfigError for a QAT module without ``to_float``.

    >>> without_training(nn.ReLU())
    ReLU()
    """
    if not hasattr(module, "weight_fake_quant"):
        return module
    to_float = getattr(module, "to_float", None)
    if not callable(to_float):
        raise ConfigError(
            f"{type(module).__name__} has a weight_fake_quant and no to_float()",
            where=type(module).__name__,
            fix="define to_float(self) -> the float module",
        )
    plain: nn.Module = to_float()
    return plain


def _is_fused(module: nn.Sequential, references: dict[type[nn.Module], type[nn.Module]]) -> bool:
    """Whether a container holds a replaceable part and what follows it, called as one."""
    if type(module) in references or not len(module):
        return False
    return type_before_parametrizations(module[0]) in references


def _reference(
    path: str,
    module: nn.Module,
    reference: type[nn.Module],
    qparams: Callable[[], dict[str, Any]],
) -> nn.Module:
    from_float = getattr(reference, "from_float", None)
    setter = f"BackendPatternConfig.set_reference_quantized_module({reference.__name__})"
    where = f"{setter}, module {path!r}"
    fix = (
        f"class {reference.__name__}:\n    @classmethod\n"
        "    def from_float(cls, module, weight_qparams): ..."
    )
    if not callable(from_float):
        raise ConfigError(
            f"the reference module {reference.__name__} has no from_float", where=where, fix=fix
        )
    found = qparams()
    try:
        with torch.no_grad():
            made: nn.Module = from_float(module, found)
    except BackquantError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{reference.__name__}.from_float raised {type(error).__name__}: {error}",
            where=where,
            fix=fix,
        ) from error
    made.train(module.training)
    return made


def _weight_qparams(module: nn.Module, make_observer: Callable[[], nn.Module]) -> dict[str, Any]:
    """The qparams of one weight; of each weight by its name for recurrent modules."""
    if isinstance(module, nn.RNNCellBase):
        names = ["weight_ih", "weight_hh"]
        return {name: _observed(getattr(module, name), make_observer) for name in names}
    if isinstance(module, nn.RNNBase):
        names = [name for name in module._flat_weights_names if name.startswith("weight")]
        return {name: _observed(getattr(module, name), make_observer) for name in names}
    return _observed(module.weight, make_observer)


def _observed(weight: Any, make_observer: Callable[[], nn.Module]) -> dict[str, Any]:
    observer = make_observer()
    held = next(observer.buffers(), None)
    if held is None or held.device != weight.device:
        observer = observer.to(weight.device)
    observer(weight.detach())
    return qparam_dict(observer)


def _same_integers(one: nn.Module, two: nn.Module) -> bool:
    return all(
        a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)
        for name in ("weight", "weight_scale", "weight_zero_point")
        for a, b in [(one._buffers[name], two._buffers[name])]
    )


# Weights that are passed to functional operators.
#
# A weight that depends on no input is computed now: its observer sees it once more (so that it needs no
# calibration, as for dynamic quantization), and in the decomposed dialect it is stored as integers that are
# dequantized where they are used, or as a narrower float that is widened there. One that depends on an
# input stays an activation.


def measure_functional_weights(
    prepared: fx.GraphModule, work: Conversion
) -> dict[str, ObservedQParams]:
    """Qparams of the weight observers whose weight is constant, by head of their group."""
    found: dict[str, ObservedQParams] = {}
    constants = Constants(work.module)
    for site in work.prepared.sites.sites:
        if site.role is not Role.WEIGHT or site.shared:
            continue
        weight = constants.tensor(work.nodes[site.name].all_input_nodes[0])
        if weight is not None:
            observer = copy.deepcopy(prepared.get_submodule(site.name))
            with torch.no_grad():
                observer(weight)
            found[site.name] = measure(observer)
    return found


def convert_functional_weights(work: Conversion, needed: frozenset[str]) -> set[str]:
    """Replace the observers of constant weights by integer buffers; returns their sites, of ``needed``."""
    if work.dialect != "decomposed":
        return set()
    constants = Constants(work.module)
    done: set[str] = set()
    for site in work.prepared.sites.sites:
        found = work.qparams[site.group]
        is_stored = found.scale is not None or is_narrow_float(found.dtype)
        if site.role is not Role.WEIGHT or site.name not in needed or not is_stored:
            continue
        node = work.nodes[site.name]
        source = node.all_input_nodes[0]
        weight = constants.tensor(source)
        if weight is None:
            continue
        name = str(source.target).replace(".", "_") if source.op == "get_attr" else source.name
        node.replace_all_uses_with(_stored(work, node, name, weight, found))
        work.editor.erase(node)
        done.add(site.name)
    return done


def _stored(
    work: Conversion, position: fx.Node, name: str, weight: torch.Tensor, found: ObservedQParams
) -> fx.Node:
    """Integer buffer and dequantize node, right before ``position``; or those of a narrower float."""
    register_quantized_decomposed()
    ops = torch.ops.quantized_decomposed
    if is_narrow_float(found.dtype):
        limit = torch.finfo(found.dtype).max
        narrow = weight.clamp(-limit, limit).to(found.dtype)
        stored = _buffer(work, position, f"{name}_quantized_", narrow)
        return _widened(work, position, ops.convert_element_type.no_fuse, (stored, torch.float32))
    if is_scaled_float(found.dtype) and found.axis is not None:
        found = _as_grid(found, weight)
    if found.scale is not None and found.scale.dim() > 1:
        return _in_blocks(work, position, name, weight, found)
    if is_scaled_float(found.dtype):
        check_narrow_float(found, name)
        scale = found.number.scale
        kept = weight.clamp(found.quant_min * scale, found.quant_max * scale)
        narrow = torch.ops.backquant.quantize_float8.default(kept, scale, found.dtype)
        stored = _buffer(work, position, f"{name}_quantized_", narrow)
        widen = torch.ops.backquant.dequantize_float8.default
        return _widened(work, position, widen, (stored, scale))
    if found.axis is None:
        qparams: tuple[Any, ...] = found.number.literals
        integers = ops.quantize_per_tensor.default(weight, *qparams)
        dequantize = ops.dequantize_per_tensor.default
    else:
        found = without_uint16(found)
        assert found.scale is not None and found.zero_point is not None
        tensors = (found.scale, found.zero_point)
        rest = (found.axis, found.quant_min, found.quant_max, found.storage)
        integers = ops.quantize_per_channel.default(weight, *tensors, *rest)
        dequantize = ops.dequantize_per_channel.default
        qparams = (
            _buffer(work, position, f"{name}_scale_", tensors[0]),
            _buffer(work, position, f"{name}_zero_point_", tensors[1]),
            *rest,
        )
    stored = _buffer(work, position, f"{name}_quantized_", integers)
    return _widened(work, position, dequantize, (stored, *qparams))


def _as_grid(found: ObservedQParams, weight: torch.Tensor) -> ObservedQParams:
    """Scales of channels as those of blocks that are channels."""
    assert found.scale is not None and found.zero_point is not None and found.axis is not None
    shape = [1] * weight.dim()
    shape[found.axis] = -1
    grid = found.scale.reshape(shape), found.zero_point.reshape(shape)
    return replace(found, scale=grid[0], zero_point=grid[1], axis=None)


def _in_blocks(
    work: Conversion, position: fx.Node, name: str, weight: torch.Tensor, found: ObservedQParams
) -> fx.Node:
    assert found.scale is not None and found.zero_point is not None
    block = block_of(weight.shape, found.scale.shape)
    integers = quantize_tensor(weight, cast(TensorQParams, replace(found, block=block)))
    stored = _buffer(work, position, f"{name}_quantized_", integers)
    qparams = (
        _buffer(work, position, f"{name}_scale_", found.scale),
        _buffer(work, position, f"{name}_zero_point_", found.zero_point),
    )
    dequantize = torch.ops.backquant.dequantize_blocks.default
    return _widened(work, position, dequantize, (stored, *qparams))


def _widened(work: Conversion, position: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    with work.editor.graph.inserting_before(position):
        result = work.editor.graph.call_function(target, args)
    work.editor.provenance.record(result.name, (position.name,))
    return result


def _buffer(work: Conversion, position: fx.Node, prefix: str, tensor: torch.Tensor) -> fx.Node:
    return work.editor.read_buffer(
        position, work.editor.names.take(prefix), work.request.kept(tensor)
    )


# The float weights that a conversion replaces (``convert_fx(..., keep_original_weights=True)``).
#
# Weights of functional operators are found under PyTorch's keys: the path of the module that computes them,
# ``_packed_weight_`` and a number. *Different:* PyTorch lists the qparams of the weight behind it and its
# bias (and in place of a missing bias), and knows no weights of modules; here each entry is weight and
# bias, and modules are found under their path.


Weights = dict[str, list[torch.Tensor | None]]


def original_weights(prepared: fx.GraphModule, reference: fx.GraphModule) -> Weights:
    """Weight and bias (or ``None``) of each quantized operator that has a weight, by key; copies.

    Args:
        prepared: from ``prepare_fx``.
        reference: what it was converted to.

    >>> import backquant
    >>> x, mapping = torch.ones(1, 3), backquant.get_default_qconfig_mapping("x86")
    >>> prepared = backquant.prepare_fx(nn.Sequential(nn.Linear(3, 2)).eval(), mapping, (x,))
    >>> _ = prepared(x)
    >>> found = original_weights(prepared, backquant.convert_to_reference_fx(prepared))
    >>> {key: [list(tensor.shape) for tensor in pair] for key, pair in found.items()}
    {'0': [[2, 3], [2]]}
    """
    state, plan = prepared_state(prepared), reference_state(reference).plan
    nodes = {node.name: node for node in prepared.graph.nodes}
    constants = Constants(prepared)
    functional = {
        reader: site.name
        for site in state.sites.sites
        if site.role is Role.WEIGHT
        for reader in site.readers
    }
    found: Weights = {}
    quantized = (m for m in plan.matches if plan.decisions[m.anchor].quantized)
    for match, root in ((m, nodes[name]) for m in quantized for name in _weighted(m)):
        if match.kind is MatchKind.STANDALONE:
            found |= _inside(prepared, reference, root)
        elif match.kind is MatchKind.PATTERN and root.op == "call_module":
            if root.name not in match.carriers:
                continue
            pair = _of_module(prepared.get_submodule(str(root.target)))
            if pair[0] is not None:
                found[str(root.target)] = pair
        elif root.name in functional:
            weight = constants.tensor(nodes[functional[root.name]])
            key = _free_key(found, state.scopes[root.name].path)
            found[key] = [_copy(weight), _bias_of(root, constants)]
    return found


def _weighted(match: Match) -> tuple[str, ...]:
    """The operators of a match that may have a weight, as a module's or as an argument."""
    return tuple(dict.fromkeys((*match.carriers, *match.readers)))


def _inside(prepared: fx.GraphModule, reference: fx.GraphModule, node: fx.Node) -> Weights:
    """The weights of a standalone module, under its path."""
    path = str(node.target)
    inner, converted = prepared.get_submodule(path), reference.get_submodule(path)
    assert isinstance(inner, PreparedModule) and isinstance(converted, ReferenceModel)
    found = original_weights(inner, converted)
    return {f"{path}.{key}": pair for key, pair in found.items()}


def _of_module(module: nn.Module) -> list[torch.Tensor | None]:
    plain = without_training(module)
    part = weighted_part(plain)
    return [_copy(getattr(part, "weight", None)), _copy(getattr(part, "bias", None))]


def _bias_of(node: fx.Node, constants: Constants) -> torch.Tensor | None:
    bias = node.kwargs.get("bias", node.args[2] if len(node.args) > 2 else None)
    return _copy(constants.tensor(bias)) if isinstance(bias, fx.Node) else None


def _copy(tensor: object) -> torch.Tensor | None:
    return tensor.detach().clone() if isinstance(tensor, torch.Tensor) else None


def _free_key(taken: Weights, path: str) -> str:
    prefix = f"{path}_packed_weight_".replace(".", "_").lower()
    number = 0
    while f"{prefix}{number}" in taken:
        number += 1
    return f"{prefix}{number}"
