"""Recurrent layers and cells: quantized at each call by default, where their backend has kernels for that.

The choice of ``quantize`` and ``explain`` for those that no rule of a mapping names: nobody has static
kernels for them. What the kernels compute is compared with the float layer on what the layer is given when
the model runs on a batch of the data:

1. The first of ``CHOICES`` whose noise stays ``LEAST_DECIBELS`` below the layer's own output is taken. Large
   weights on small inputs make integers useless: 8 bits of an input then say nothing of its small values.
2. Where none does, the layer stays float, with both figures as its reason.
3. Whether it pays is decided later, together with all other operators (``slower``): small layers do not
   on one row, large ones do several times over.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from backquant.backend_config import BackendConfig
from backquant.errors import EngineError
from backquant.fuse import can_separate_layers, layers_of_recurrent
from backquant.graph import check_inputs, get_module
from backquant.match import MatchKind, Plan, Reason
from backquant.match.default_rules import ChosenRules, Draft, first_of
from backquant.nn.quantized.reference import LSTM
from backquant.nn.quantized.reference.stepped import lstm_step_by_step
from backquant.operators.recurrent import PAIRS
from backquant.pipeline.eager import kernels_alone
from backquant.qconfig import (
    QConfig,
    float16_dynamic_qconfig,
    per_channel_dynamic_qconfig,
)
from backquant.reason_codes import ReasonCode

_KINDS = tuple(kind for kind, _ in PAIRS)
#: The least distance between a layer's output and the noise of its kernel.
LEAST_DECIBELS = 20.0
#: What is tried, in this order, by its name in reports.
CHOICES: Mapping[str, QConfig] = {
    "int8": per_channel_dynamic_qconfig,
    "float16": float16_dynamic_qconfig,
}
_Call = tuple[tuple[Any, ...], dict[str, Any], Any]
_CALLS = 4  # of one module that are compared: cells are called at each step


def has_recurrent(model: nn.Module) -> bool:
    """Whether there are recurrent layers or cells in ``model``.

    >>> has_recurrent(nn.GRUCell(2, 2)), has_recurrent(nn.Linear(2, 2))
    (True, False)
    """
    return any(type(module) in _KINDS for module in model.modules())


def quantizes_recurrent(plan: Plan) -> bool:
    """Whether ``plan`` quantizes a recurrent layer or cell.

    >>> quantizes_recurrent(Plan("x86"))
    False
    """
    names = {kind.__name__ for kind in _KINDS}
    return any(d.quantized and d.operator in names for d in plan.decisions.values())


def rules_for_recurrent(draft: Draft, data: Any) -> ChosenRules | None:
    """Rules for the recurrent layers that the backend can quantize; ``None`` where there are none.

    ``data``: inputs of the model, as near to what it will meet as there are.
    """
    module, plan, backend, mapping = draft.module, draft.plan, draft.backend, draft.mapping
    nodes = [node for node in _recurrent(module, plan) if not draft.is_named(node.name)]
    if not nodes:
        return None
    paths = list(dict.fromkeys(str(node.target) for node in nodes))
    try:
        noise = _noise(module, _calls(module, paths, data), backend)
        separate = tuple(_to_separate(module, nodes, noise, data, backend))
    except EngineError:  # the engine is not here, and nothing runs: ``explain``
        return None
    if separate:
        return ChosenRules(mapping, (), separate_layers=separate)
    result = copy.copy(mapping)
    chosen: dict[str, list[str]] = {name: [] for name in CHOICES}
    reasons = {}
    for node in nodes:
        found = noise[str(node.target)]
        name = _choice(found)
        path = plan.decisions[node.name].module_path
        if name:
            result.set_module_name(path, CHOICES[name])
            chosen[name].append(path)
        elif found:
            reasons[node.name] = _reason(node, path, found)
    notes = []
    for name, paths in chosen.items():
        if paths:
            how = "quantized at each call" if name == "int8" else f"computed with {name} weights"
            shown = first_of(dict.fromkeys(paths))
            notes.append(f"recurrent, {how} by default on {backend.name}: {shown}")
    return ChosenRules(result, tuple(notes), reasons)


def _to_separate(
    module: fx.GraphModule,
    nodes: list[fx.Node],
    noise: Mapping[str, Mapping[str, float]],
    data: Any,
    backend: BackendConfig,
) -> Iterator[str]:
    """Stacked recurrent modules some layers of which can be quantized and some not: they are decided by
    layer."""
    calls = Counter(str(node.target) for node in nodes)
    for node in nodes:
        path = str(node.target)
        layers = layers_of_recurrent(get_module(module, path))
        if len(layers) < 2 or _choice(noise[path]) == next(iter(CHOICES)):
            continue
        lstm = isinstance(layers[0], nn.LSTM)
        if calls[path] > 1 or not can_separate_layers(node, lstm=lstm):
            continue
        seen = _calls_of_layers(layers, _calls(module, [path], data)[path])
        found = _noise(nn.ModuleList(layers), seen, backend)
        if len({_choice(levels) for levels in found.values()}) > 1:
            yield node.name


def _calls_of_layers(layers: list[nn.Module], calls: list[_Call]) -> dict[str, list[_Call]]:
    """What each layer reads and gives, from a state of zeros."""
    found: dict[str, list[_Call]] = {str(number): [] for number in range(len(layers))}
    with torch.no_grad():
        for args, kwargs, _ in calls:
            value = args[0] if args else kwargs["input"]
            for number, layer in enumerate(layers):
                result = layer(value)
                found[str(number)].append(((value,), {}, result))
                value = result[0]
    return found


def _choice(levels: Mapping[str, float]) -> str:
    """The first way whose noise is low enough; ``""`` for none."""
    return next((name for name, level in levels.items() if level >= LEAST_DECIBELS), "")


def _recurrent(module: fx.GraphModule, plan: Plan) -> Iterator[fx.Node]:
    """The calls of recurrent layers that the backend knows and that are not quantized yet."""
    known = {match.anchor for match in plan.matches if match.kind is MatchKind.PATTERN}
    for node in module.graph.nodes:
        if node.op == "call_module" and node.name in known:
            called = get_module(module, str(node.target))
            if type(called) in _KINDS and not plan.decisions[node.name].quantized:
                yield node


def _calls(module: fx.GraphModule, paths: list[str], data: Any) -> dict[str, list[_Call]]:
    """Arguments and results of the first calls of the modules at ``paths``."""
    found: dict[str, list[_Call]] = {path: [] for path in paths}

    def watching(path: str) -> Any:
        def note(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if len(found[path]) < _CALLS:
                found[path].append((args, kwargs, result))

        return note

    handles = [
        get_module(module, path).register_forward_hook(watching(path), with_kwargs=True)
        for path in paths
    ]
    try:
        module.recompile()  # a deferred graph module has no signature before
        check_inputs(module, data)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _noise(
    module: nn.Module, calls: Mapping[str, list[_Call]], backend: BackendConfig
) -> dict[str, dict[str, float]]:
    """Decibels between the layer's output and the noise of its kernel, by path and name of a choice.

    Choices after the first that will do are not tried.
    """
    found: dict[str, dict[str, float]] = {path: {} for path in calls}
    for name, qconfig in CHOICES.items():
        open_paths = [
            path
            for path, tried in found.items()
            if not any(level >= LEAST_DECIBELS for level in tried.values())
            and (backend.engine is not None or not any(map(_is_packed, calls[path])))
        ]
        for path, kernel in _kernels(module, dict.fromkeys(open_paths, qconfig), backend).items():
            found[path][name] = min((_decibels(kernel, call) for call in calls[path]), default=0.0)
    return found


def _is_packed(call: _Call) -> bool:
    """Whether a layer is given sequences of several lengths as one, which no runtime's file holds."""
    args, kwargs, _ = call
    return isinstance(args[0] if args else kwargs["input"], PackedSequence)


def _kernels(
    module: nn.Module, requested: Mapping[str, QConfig], backend: BackendConfig
) -> Mapping[str, Callable[..., Any]]:
    """What computes each layer of ``requested`` that the backend quantizes so: its engine's kernel, or, where
    a runtime has it, the same arithmetic in floats."""
    alone = kernels_alone(module, requested, backend)
    if backend.engine is not None:
        return alone.kernels
    return {
        path: partial(lstm_step_by_step, reference)
        for path, reference in alone.modules.items()
        if isinstance(reference, LSTM)
    }


def _decibels(kernel: Callable[..., Any], call: _Call) -> float:
    """The decibels of the noisiest tensor that the layer returns."""
    args, kwargs, result = call
    with torch.no_grad():
        got = kernel(*args, **kwargs)
    pairs = zip(_floats(result), _floats(got), strict=True)
    return min(_distance(wanted, found) for wanted, found in pairs)


def _floats(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.is_floating_point()]


def _distance(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """
    >>> _distance(torch.ones(2), torch.tensor([0.9, 1.1]))
    20.0
    """
    signal = wanted.double().square().sum().item()
    noise = (wanted.double() - found.double()).square().sum().item()
    if noise == 0:
        return math.inf
    found_level = 10 * math.log10(signal / noise) if signal > 0 else -math.inf
    return round(found_level, 1) if math.isfinite(found_level) else -math.inf


def _reason(node: fx.Node, path: str, found: Mapping[str, float]) -> Reason:
    levels = ", ".join(f"{name} {level:.1f} dB" for name, level in found.items())
    fix = f"qconfig_mapping.set_module_name({path!r}, float16_dynamic_qconfig)"
    if "float16" not in found:  # the backend has it in 8 bits alone
        fix = f"qconfig_mapping.set_module_name({path!r}, per_channel_dynamic_qconfig), if that is enough"
    return Reason(
        node.name,
        ReasonCode.NOISE_OF_WEIGHTS,
        f"its output over the noise of its kernel: {levels}",
        f"at least {LEAST_DECIBELS:.0f} dB",
        fix=fix,
        place="measured here, on a batch of the data",
    )
