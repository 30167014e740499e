"""Observed custom modules become quantized ones, by the user's classes or ours.

1. ``ConvertCustomConfig`` maps the class of an observed module, for the kind of quantization that its
   rule asks for, to a class with ``from_observed``. The classes of ``backquant.nn.quantizable`` are
   mapped to those of ``backquant.nn.quantized`` without being named.
2. Static, as in PyTorch: the module gets the observer of its output as ``activation_post_process``.
   It is called with quantized tensors (``torch.quantize_per_tensor``) and gives one: its first
   argument; of an LSTM the input and both states; of an attention query, key and value.
   A class with ``float_interface = True``, as ours have it, takes and gives floats: values are
   quantized and dequantized around it as around any operator.
3. Dynamic and weight-only modules take and give floats and quantize inside.
4. An observed module that stood in the model from the start (left whole by
   ``set_non_traceable_module_classes``) is replaced, too, if its class is mapped.
5. *Different:* an observed module whose class is mapped to nothing is an error. PyTorch leaves it as
   it is, observing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from backquant.convert.dialects import is_dequantize
from backquant.convert.interface import plain_qparams
from backquant.convert.state import Conversion
from backquant.dtypes import tensor_token
from backquant.errors import ConfigError
from backquant.graph import free_path, nodes_in, set_module
from backquant.match.plan import Decision, Match, MatchKind, Outcome
from backquant.match.refusal import op_name
from backquant.match.roles import requested_kind
from backquant.match.rules import RuleTable
from backquant.nn import quantizable, quantized
from backquant.prepare import Site, give_qconfigs
from backquant.prepare.standalone import made_by_class
from backquant.qconfig import ConvertCustomConfig, QuantType

_OURS: dict[type, type] = {
    quantizable.LSTM: quantized.LSTM,
    quantizable.LSTMCell: quantized.LSTMCell,
    quantizable.MultiheadAttention: quantized.MultiheadAttention,
}
_RECURRENT = ("LSTM", "LSTMCell")
_ATTENTION = "MultiheadAttention"


@dataclass(frozen=True)
class CustomSwap:
    """One call of an observed module that is to be quantized; ``site``: that of its output."""

    node: fx.Node
    kind: QuantType
    quantized_class: type
    site: Site | None

    @property
    def takes_quantized_tensors(self) -> bool:
        """Whether values around the call are PyTorch's quantized tensors."""
        floats = getattr(self.quantized_class, "float_interface", False)
        return self.kind is QuantType.STATIC and not floats


def custom_swaps(work: Conversion, custom: ConvertCustomConfig) -> list[CustomSwap]:
    """The calls of observed custom modules, in graph order.

    Those that were in the model from the start become quantized in ``work.plan``.

    Raises ConfigError for an observed class that is mapped to nothing, and for a module that is to be
    float again and has no ``to_float``.
    """
    outputs = {site.producer: site for site in work.prepared.sites.sites if site.producer}
    observed = {
        match.anchor
        for match in work.prepared.plan.matches
        if match.kind is MatchKind.CUSTOM_MODULE
        and work.prepared.plan.decisions[match.anchor].quantized
    }
    found = []
    for name, node in work.nodes.items():
        decision = work.plan.decisions.get(name)
        if node.op != "call_module" or decision is None:
            continue
        module = work.module.get_submodule(str(node.target))
        kind = requested_kind(decision.asked_activation, decision.asked_weight)
        if name in observed and not decision.quantized:
            _make_float(work, node, module)
            continue
        if kind is None:
            continue
        mapped = custom.observed_to_quantized_mapping.get(kind, {}).get(type(module))
        if name in observed:
            mapped = mapped or _required(module, kind, node)
            found.append(CustomSwap(node, kind, mapped, outputs.get(name)))
        elif mapped is not None and decision.match is None:
            found.append(_from_the_start(work, decision, CustomSwap(node, kind, mapped, None)))
    return found


def _required(module: nn.Module, kind: QuantType, node: fx.Node) -> type:
    if type(module) in _OURS:
        return _OURS[type(module)]
    name = type(module).__name__
    quant_type = "" if kind is QuantType.STATIC else f", QuantType.{kind.name}"
    raise ConfigError(
        f"nothing says what the observed module {name} becomes",
        where=f"ConvertCustomConfig, node {node.name!r}",
        fix=f"ConvertCustomConfig().set_observed_to_quantized_mapping({name}, Quantized{quant_type})",
    )


def _make_float(work: Conversion, node: fx.Node, module: nn.Module) -> None:
    to_float = getattr(module, "to_float", None)
    if not callable(to_float):
        raise ConfigError(
            f"{type(module).__name__} was observed and cannot become float again: it has no to_float()",
            where=f"the QConfigMapping of convert, node {node.name!r}",
            fix="set it to None when preparing, or define to_float(self) -> the float module",
        )
    set_module(work.module, str(node.target), to_float())


def _from_the_start(work: Conversion, decision: Decision, swap: CustomSwap) -> CustomSwap:
    """The swap for an observed module that was in the model before ``prepare_fx``; it is added to the
    plan."""
    module = work.module.get_submodule(str(swap.node.target))
    name = type(module).__name__
    if swap.takes_quantized_tensors:
        raise ConfigError(
            f"{name} takes quantized tensors, and nothing around it is observed",
            where=f"ConvertCustomConfig, node {swap.node.name!r}",
            fix=f"PrepareCustomConfig().set_float_to_observed_mapping(Float, {name})",
        )
    if getattr(module, "qconfig", None) is None:
        qconfig = work.source.qconfig(decision.rule)
        give_qconfigs(
            module, decision.module_path, qconfig, RuleTable(work.prepared.qconfig_mapping)
        )
    position = len(work.plan.matches)
    node = decision.node
    match = Match(-1, op_name(type(module)), (node,), node, MatchKind.CUSTOM_MODULE)
    own = replace(decision, outcome=Outcome.QUANTIZED, match=position, reasons=())
    decisions = {**work.plan.decisions, node: own}
    work.plan = replace(work.plan, matches=(*work.plan.matches, match), decisions=decisions)
    return swap


def fuse_outputs(work: Conversion, swaps: list[CustomSwap]) -> set[str]:
    """Values of modules that give quantized tensors are dequantized; returns the sites that are gone.

    The observer of the output is the module's own from now on. In the ``"decomposed"`` dialect its
    qparams stand in the graph, too, behind the dequantize node, for the integer kernels that follow.
    """
    gone: set[str] = set()
    for swap in swaps:
        if not swap.takes_quantized_tensors:
            continue
        if swap.site is not None and work.dialect == "quantized_tensor":
            observer = work.nodes[swap.site.name]
            observer.replace_all_uses_with(swap.node)
            work.editor.erase(observer)
            gone.add(swap.site.name)
        module = work.module.get_submodule(str(swap.node.target))
        with work.editor.graph.inserting_after(swap.node):
            if _family(module):
                value = work.editor.graph.call_function(dequantize_all, (swap.node,))
            else:
                value = work.editor.graph.call_method("dequantize", (swap.node,))
        work.editor.provenance.record(value.name, (swap.node.name,))
        work.editor.replace_uses(swap.node, value)
    return gone


def dequantize_all(value: Any) -> Any:
    """Nested tuples of quantized tensors as tuples of floats; anything else as it is.

    >>> dequantize_all((torch.quantize_per_tensor(torch.ones(1), 0.5, 0, torch.quint8), None))
    (tensor([1.]), None)
    """
    if isinstance(value, (tuple, list)):
        return tuple(map(dequantize_all, value))
    if isinstance(value, torch.Tensor) and value.is_quantized:
        return value.dequantize()
    return value


def convert_custom_modules(
    work: Conversion, swaps: list[CustomSwap], observers: fx.GraphModule
) -> None:
    """Replace the modules; ``observers`` is the prepared model.

    Raises ConfigError when ``from_observed`` fails or returns no module.
    """
    made: dict[tuple[str, str], str] = {}
    observed = {str(s.node.target): work.module.get_submodule(str(s.node.target)) for s in swaps}
    for swap in swaps:
        path = str(swap.node.target)
        key = (path, swap.site.group if swap.site is not None else "")
        if key not in made:
            module = copy.deepcopy(observed[path])
            if swap.site is not None and swap.kind is QuantType.STATIC:
                output = copy.deepcopy(observers.get_submodule(swap.site.group))
                module.activation_post_process = output
            made[key] = free_path(work.module, path) if path in made.values() else path
            set_module(work.module, made[key], _quantized(module, swap))
        swap.node.target = made[key]
        if swap.takes_quantized_tensors:
            _pass_quantized(work, swap.node, observed[path])


def _quantized(module: nn.Module, swap: CustomSwap) -> nn.Module:
    name = swap.quantized_class.__name__
    where = f"ConvertCustomConfig: {type(module).__name__}, node {swap.node.name!r}"
    fix = f"class {name}:\n    @classmethod\n    def from_observed(cls, module): ...  # a module"
    return made_by_class(swap.quantized_class, "from_observed", module, where, fix)


def _pass_quantized(work: Conversion, node: fx.Node, module: nn.Module) -> None:
    """Pass the quantized values themselves for arguments that the module takes quantized, not the
    dequantized ones."""
    for value in dict.fromkeys(_quantized_arguments(node, module)):
        if not is_dequantize(value):
            continue
        qparams = plain_qparams(value)
        if qparams is None:
            node.replace_input_with(value, value.args[0])  # type: ignore[arg-type]
            continue
        with work.editor.graph.inserting_before(node):
            tensor = work.editor.graph.call_function(
                torch.quantize_per_tensor,
                (value, qparams.scale, qparams.zero_point, tensor_token(qparams.dtype)),
            )
        work.editor.provenance.record(tensor.name, (value.name,))
        node.replace_input_with(value, tensor)


def _quantized_arguments(node: fx.Node, module: nn.Module) -> Iterator[fx.Node]:
    arguments: tuple[Any, ...] = (*node.args, *node.kwargs.values())
    family = _family(module)
    if not family:
        arguments = arguments[:1]
    elif family == _ATTENTION:
        arguments = arguments[:3]
    yield from (value for argument in arguments for value in nodes_in(argument))


def _family(module: nn.Module) -> str:
    """The kind of module whose result is a tuple: ours, PyTorch's, or derived from them; else empty."""
    names = (base.__name__ for base in type(module).__mro__)
    return next((name for name in names if name in (*_RECURRENT, _ATTENTION)), "")
