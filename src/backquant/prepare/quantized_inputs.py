"""Inputs of a model that arrive quantized: what their integers stand for is measured, too.

PyTorch's quantized tensors carry their qparams. A plain integer tensor does not, so each such input
gets an observer here, ``quantized_input_0`` for input 0, …: in the ``"decomposed"`` dialect (and on
integer kernels) the input is integers with the qparams that this observer measured, on calibration
data in float. The other dialect does without it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from backquant.errors import ConfigError
from backquant.graph import GraphEditor, verify
from backquant.observe import MinMaxObserver
from backquant.observe.protocol import is_fixed_qparams, is_placeholder
from backquant.prepare.record import PreparedModule, Record, prepared_state, with_state
from backquant.prepare.requests import ObserverSource, ObserverSpec
from backquant.prepare.roles import Role
from backquant.prepare.sites import QUANTIZED_INPUT, Site, SiteTable

_UNSIGNED = (torch.quint8, torch.uint8)


class QuantizedInput(nn.Module):
    """Measures an input that arrives quantized, with the observer ``activation_post_process``."""

    def __init__(self, observer: nn.Module) -> None:
        super().__init__()
        self.activation_post_process = observer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, measured."""
        out: torch.Tensor = self.activation_post_process(x)
        return out

    def __getattr__(self, name: str) -> Any:
        """What it lacks is the observer's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("activation_post_process"), name)


def observe_quantized_inputs(prepared: PreparedModule) -> PreparedModule:
    """Add the observers of quantized inputs to ``prepared``, in place; returns it.

    Raises ConfigError for an index that is no input.

    >>> from backquant.backend_config import BackendConfig
    >>> from backquant.match.plan import Plan
    >>> from backquant.prepare.insert import insert_observers
    >>> from backquant.qconfig import PrepareCustomConfig, QConfigMapping
    >>> custom = PrepareCustomConfig().set_input_quantized_indexes([0])
    >>> record = Record(Plan("b"), BackendConfig("b"), QConfigMapping(), custom)
    >>> prepared = insert_observers(fx.symbolic_trace(nn.ReLU()), record)
    >>> [node.name for node in observe_quantized_inputs(prepared).graph.nodes]
    ['input_1', 'quantized_input_0', 'relu', 'output']
    """
    state = prepared_state(prepared)
    indexes = () if state.custom is None else state.custom.input_quantized_indexes
    inputs = [node for node in prepared.graph.nodes if node.op == "placeholder"]
    editor = GraphEditor(prepared, state.provenance)
    sites: list[Site] = []
    for index in dict.fromkeys(indexes):
        if index >= len(inputs):
            raise ConfigError(
                f"input {index} is to arrive quantized, and the model has {len(inputs)} inputs",
                where="PrepareCustomConfig.set_input_quantized_indexes",
                fix=f"one of {', '.join(map(str, range(len(inputs))))}",
            )
        node = inputs[index]
        sites.append(_observed(editor, node, f"{QUANTIZED_INPUT}{index}", _observer(state, node)))
    if sites:
        editor.finish()
        verify(prepared, after="pass 'observe quantized inputs'")
        table = SiteTable((*sites, *state.sites.sites), state.sites.refused)
        with_state(prepared, replace(state, sites=table, provenance=editor.provenance))
    return prepared


def _observed(editor: GraphEditor, node: fx.Node, name: str, observer: nn.Module) -> Site:
    readers = tuple(user.name for user in node.users)
    device = next((tensor.device for tensor in editor.module.parameters()), None)
    module = QuantizedInput(observer).to(device).train(editor.module.training)
    editor.insert_module_after(node, name, module)
    return Site(
        name, node.name, Role.QUANTIZED_INPUT, ObserverSpec(None, "input"), readers, "", name
    )


def _observer(state: Record, node: fx.Node) -> nn.Module:
    """What the first quantized reader measures with, if that is of an unsigned dtype; else min/max."""
    source = ObserverSource(state.backend_config, state.qconfig_mapping)
    for user in node.users:
        decision = state.plan.decisions.get(user.name)
        if decision is None or not decision.quantized or decision.rule is None:
            continue
        made = source.make(ObserverSpec(decision.rule, "activation"))
        inner = getattr(made, "activation_post_process", None)
        observer = inner if isinstance(inner, nn.Module) else made
        measures = not (is_fixed_qparams(observer) or is_placeholder(observer))
        if measures and getattr(observer, "dtype", None) in _UNSIGNED:
            return observer
    return MinMaxObserver(dtype=torch.quint8)
