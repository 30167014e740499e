"""What standalone and custom modules take and give, for the observers around them.

1. A standalone module's inputs are observed where they are to arrive quantized (by position or by
   keyword; PyTorch overlooks keywords). Its output is not observed here, but inside of
   the module, if at all.
   *Different:* its output counts as quantized only if it leaves so. PyTorch takes it for quantized
   always, and leaves the operator behind a standalone module with float output in float.
2. Static custom modules: as operators, inputs and output are observed.
3. *Different:* the tuples that ``nn.LSTM``, ``nn.LSTMCell`` and ``nn.MultiheadAttention`` give are not
   observed; what reads their parts observes them. PyTorch has stubs there for LSTM, and its observer
   of an attention's tuple fails. Masks of an attention are not observed.
4. Dynamic and weight-only custom modules take and give floats; nothing is observed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx, nn

from backquant.match.custom import requested_kind
from backquant.match.plan import MatchKind, Plan
from backquant.prepare.record import PreparedModule
from backquant.prepare.roles import argument_nodes
from backquant.prepare.standalone import quantized_inputs, quantized_output
from backquant.qconfig import PrepareCustomConfig, QuantType

_TUPLES = (nn.RNNBase, nn.LSTMCell, nn.MultiheadAttention)
_ATTENTION_INPUTS = ("query", "key", "value")


@dataclass(frozen=True)
class Interface:
    """``inputs``: arguments to observe. ``gives``: the dtype of the value if it is not observed."""

    inputs: tuple[fx.Node, ...] = ()
    observed_output: bool = False
    gives: torch.dtype = torch.float32


def interfaces(
    module: fx.GraphModule, plan: Plan, custom: PrepareCustomConfig | None
) -> dict[str, Interface]:
    """The interface of each quantized standalone and custom module, by the node that calls it.

    Standalone modules that are not prepared, and custom modules without a config, have none.
    """
    nodes = {node.name: node for node in module.graph.nodes}
    found: dict[str, Interface] = {}
    for match in plan.matches:
        decision = plan.decisions[match.anchor]
        if match.kind is MatchKind.PATTERN or not decision.quantized:
            continue
        node = nodes[match.anchor]
        called = module.get_submodule(str(node.target))
        if match.kind is MatchKind.STANDALONE and isinstance(called, PreparedModule):
            found[match.anchor] = _of_standalone(called, node)
        elif match.kind is MatchKind.CUSTOM_MODULE and custom is not None:
            kind = requested_kind(decision.asked_activation, decision.asked_weight)
            found[match.anchor] = _of_custom(called, node, kind)
    return found


def _of_standalone(module: PreparedModule, node: fx.Node) -> Interface:
    observer = quantized_output(module)
    inputs = tuple(_arguments_of(node, module))
    return Interface(inputs) if observer is None else Interface(inputs, gives=_dtype(observer))


def _of_custom(module: nn.Module, node: fx.Node, kind: QuantType | None) -> Interface:
    if kind is not QuantType.STATIC:
        return Interface()
    inputs = tuple(dict.fromkeys(_custom_arguments(module, node)))
    return Interface(inputs, observed_output=not isinstance(module, _TUPLES))


def _dtype(observer: nn.Module) -> torch.dtype:
    dtype = observer.dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def _arguments_of(node: fx.Node, inner: PreparedModule) -> Iterator[fx.Node]:
    wanted = quantized_inputs(inner)
    names = [str(place.target) for place in inner.graph.nodes if place.op == "placeholder"]
    passed = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    for name in wanted:
        if isinstance(passed.get(name), fx.Node):
            yield passed[name]  # type: ignore[misc]


def _custom_arguments(module: nn.Module, node: fx.Node) -> Iterator[fx.Node]:
    if not isinstance(module, nn.MultiheadAttention):
        yield from argument_nodes(node)
        return
    passed = {**dict(zip(_ATTENTION_INPUTS, node.args, strict=False)), **node.kwargs}
    for name in _ATTENTION_INPUTS:
        if isinstance(passed.get(name), fx.Node):
            yield passed[name]  # type: ignore[misc]
