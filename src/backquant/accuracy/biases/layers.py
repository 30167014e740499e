"""The quantized layers whose biases can be corrected, and what they compute."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from backquant.accuracy.figures import float_tensors
from backquant.accuracy.reference_run import Run
from backquant.calibrate.batches import count_of, values_in
from backquant.graph import get_module
from backquant.graph.edit import weighted_part
from backquant.graph.export import interface_of
from backquant.match.refusal import chosen_dtype_config
from backquant.prepare import prepared_state

# What layers read and give in float, seen on a few batches while these are calibrated.
#
# 1. How many batches are watched depends on what is known before the second: layers, nodes and multiply-adds
#    of the graph, and how many batches there are. What is done with them is to take a small share of what
#    ``quantize`` takes; where it would not, none is watched.
# 2. Of each watched batch the means of the channels are kept that layers read and give, and the outputs; of
# the    layers themselves nothing. Of all batches the squares of the channels that layers read are summed.
# 3. Only sets whose length is known are watched, as the batches are spread over the set.

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

#: Of the estimated time of ``quantize``.
SHARE = 0.13

#: Batches to fit on and batches to judge on, the best choice first.
_CHOICES = ((8, 2), (6, 2), (4, 1), (3, 1), (2, 1), (1, 1))
_LEAST = 3  # batches in a set

# Microseconds of one core: of a layer in `quantize`, and of a node that is exported; of a node in a run with
# roundings; of 1000 multiply-adds; of a weight that is compared with its integers.
_LAYER, _EXPORTED, _NODE, _THOUSAND, _WEIGHT = 15_000.0, 4_000.0, 90.0, 0.025, 0.004

# How often `quantize` runs the model on its example; what multiply-adds take beside observers, and beside
# roundings.
_RUNS, _OBSERVED, _ROUNDED = 8.0, 1.3, 1.2


@dataclass
class Seen:
    """One batch, and what the model returned for it. Of one that is fitted on: of each layer, by its path,
    the mean of each channel that it reads and that it gives."""

    batch: Any
    reads: dict[str, torch.Tensor] = field(default_factory=dict)
    gives: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: list[torch.Tensor] = field(default_factory=list)


class Watched:
    """The batches of a calibration set, some of which are watched while whoever goes over them feeds them to
    ``prepared``. ``example``: what the model is tried on otherwise. ``squares``: of each channel that a layer
    reads, summed over all batches, by the path of the layer."""

    def __init__(self, prepared: fx.GraphModule, batches: Iterable[Any], example: Any) -> None:
        self._prepared, self._batches, self._example = prepared, batches, example
        self.fitting: list[Seen] = []
        self.judging: list[Seen] = []
        self.squares: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self.fitting, self.judging, self.squares = [], [], {}
        chosen: dict[int, list[Seen]] = {}
        layers: list[tuple[str, Any]] = []
        with ExitStack() as hooks:
            for index, batch in enumerate(self._batches):
                if index == 0:
                    chosen = self._chosen(values_in(batch) / max(values_in(self._example), 1))
                    layers = list(_layers(self._prepared))
                    for path, part in layers:
                        sum_up = _sum_squares(path, part, self.squares)
                        hooks.callback(part.register_forward_hook(sum_up).remove)
                if index not in chosen:
                    yield batch
                    continue
                seen, kind = Seen(batch), chosen[index]
                with _noting(self._prepared, layers if kind is self.fitting else [], seen):
                    yield batch
                kind.append(seen)

    def _chosen(self, size: float) -> dict[int, list[Seen]]:
        """Where what is seen of a batch belongs to, by its number; ``size``: of a batch, in examples."""
        count = len(self)
        fit, judge = batches_worth(self._prepared, count, size)
        every = fit + judge
        if not every:
            return {}
        places = [place * count // every for place in range(every)]
        held = set(places[1 :: every // judge][:judge])
        return {place: self.judging if place in held else self.fitting for place in places}


def calibration_with_statistics(
    prepared: fx.GraphModule, batches: Any, example: Any
) -> Watched | None:
    """``batches`` as a set that is watched; ``None`` where they are too few, or biases are rounded."""
    record = prepared_state(prepared)
    if not _is_watchable(batches):
        return None
    for match in record.plan.matches:
        config = chosen_dtype_config(record.plan, record.backend_config, match)
        if config is not None and config.bias_scale is not None:
            return None
    return Watched(prepared, batches, example)


def _is_watchable(batches: Any) -> bool:
    """Whether a set has a known length, of three batches at least.

    >>> _is_watchable([1, 2, 3]), _is_watchable([1]), _is_watchable(iter([1, 2, 3]))
    (True, False, False)
    """
    return (count_of(batches) or 0) >= _LEAST


def batches_worth(prepared: fx.GraphModule, count: int, size: float) -> tuple[int, int]:
    """Rule 1: how many of ``count`` batches are to be fitted on, and how many are to judge; ``size``: of a
    batch, in examples."""
    costs = prepared_state(prepared).costs
    if costs is None or not costs.total:
        return 0, 0
    example = _THOUSAND * costs.total / 1000
    layers = sum(1 for _ in _layers(prepared))
    steps = _NODE * len(prepared.graph.nodes)
    each = _OBSERVED * size * example + steps / 2
    total = _RUNS * example + count * each + _LAYER * layers
    if interface_of(prepared) is not None:
        total += _EXPORTED * len(prepared.graph.nodes)
    run = _ROUNDED * size * example + steps
    weights = _WEIGHT * sum(tensor.numel() for tensor in prepared.parameters())
    for fit, judge in _CHOICES:
        runs = (fit if fit > 1 else 0) + 2 * judge
        if fit + judge <= count and runs * run + weights <= SHARE * total:
            return fit, judge
    return 0, 0


@contextmanager
def _noting(prepared: fx.GraphModule, layers: list[tuple[str, Any]], seen: Seen) -> Iterator[None]:
    """Note in ``seen`` what the next call of ``prepared`` shows; rule 2."""

    def result(_: nn.Module, __: Any, output: Any) -> None:
        seen.outputs = [tensor.detach() for tensor in float_tensors(output)]

    handles = [prepared.register_forward_hook(result)]
    for path, part in layers:
        handles.append(part.register_forward_hook(_note(path, part, seen)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note(path: str, part: Any, seen: Seen) -> Any:
    axis = 1 - part.weight.dim()

    def note(_: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if args and path not in seen.gives:
            seen.reads[path] = channel_means(args[0].detach(), axis)
            seen.gives[path] = channel_means(result.detach(), axis)

    return note


def _sum_squares(path: str, part: Any, squares: dict[str, torch.Tensor]) -> Any:
    axis = 1 - part.weight.dim()

    def add(_: nn.Module, args: tuple[Any, ...], __: Any) -> None:
        if args and args[0].dim() >= -axis:
            values = args[0].detach().movedim(axis, 0).unsqueeze(-1).flatten(1)
            own = torch.linalg.vector_norm(values, dim=1).double().square()
            squares[path] = squares[path] + own if path in squares else own

    return add


def channel_means(values: torch.Tensor, axis: int) -> torch.Tensor:
    """
    >>> channel_means(torch.tensor([[[1.0, 3.0], [5.0, 5.0]]]), -2)
    tensor([2., 5.], dtype=torch.float64)
    """
    axis = axis % values.dim()
    others = [other for other in range(values.dim()) if other != axis]
    return (values.mean(others) if others else values).double()


def _layers(prepared: fx.GraphModule) -> Iterator[tuple[str, Any]]:
    """The layers that are called once, by path."""
    calls: dict[str, int] = {}
    for node in prepared.graph.nodes:
        if node.op == "call_module":
            calls[str(node.target)] = calls.get(str(node.target), 0) + 1
    parts: dict[int, tuple[str, Any]] = {}
    shared: set[int] = set()
    for path, count in calls.items():
        part = weighted_part(get_module(prepared, path))
        if isinstance(part, LAYERS):
            if count > 1 or id(part) in parts:
                shared.add(id(part))
            parts[id(part)] = path, part
    yield from (found for key, found in parts.items() if key not in shared)


@dataclass(frozen=True)
class LayerCall:
    """A quantized layer and its only call. ``is_last``: no other layer reads what comes of it."""

    path: str
    node: fx.Node
    float_part: Any
    called: nn.Module
    is_last: bool

    def in_float(self) -> Any:
        """The layer with the weights that its integers stand for."""
        reference: Any = weighted_part(self.called)
        made = copy.copy(self.float_part)
        weight = nn.Parameter(reference.dequantized_weight(), requires_grad=False)
        made._parameters = {"weight": weight, "bias": reference.bias}
        return made

    def before_activation(self, part: Any, run: Run) -> torch.Tensor:
        """What the layer itself gives, without what is fused with it."""
        result: torch.Tensor = part(run.values[self.node.all_input_nodes[0].name])
        return result

    def spread(self, channels: torch.Tensor) -> torch.Tensor:
        """A number for each output channel, in the shape that results are added to."""
        weight = self.float_part.weight
        return channels.to(weight.dtype).reshape(-1, *[1] * (weight.dim() - 2))

    def activated(self, result: Any) -> Any:
        """The result of the call, from that of the layer itself."""
        if self.called is not weighted_part(self.called):
            for behind in list(self.called.children())[1:]:
                result = behind(result)
        return result


def layer_calls(
    prepared: fx.GraphModule, reference: fx.GraphModule, seen: list[Seen]
) -> dict[str, LayerCall]:
    """The quantized layers that every batch of ``seen`` went through, by the name of their call."""
    found: dict[str, LayerCall] = {}
    leads_on: set[fx.Node] = set()
    for node in reversed(reference.graph.nodes):
        behind = any(user in leads_on for user in node.users)
        path = str(node.target)
        if node.op == "call_module" and all(path in one.gives for one in seen):
            part = weighted_part(get_module(prepared, path))
            called = get_module(reference, path)
            own: Any = weighted_part(called)
            integers = hasattr(own, "dequantized_weight") and not own.weight.is_floating_point()
            if isinstance(part, LAYERS) and integers and len(node.all_input_nodes) == 1:
                found[node.name] = LayerCall(path, node, part, called, not behind)
                behind = True
        if behind:
            leads_on.add(node)
    return found


def set_biases(reference: fx.GraphModule, biases: Mapping[str, torch.Tensor]) -> None:
    """Give layers of ``reference`` these biases, by path."""
    for path, bias in biases.items():
        part = weighted_part(get_module(reference, path))
        part._parameters["bias"] = nn.Parameter(bias, requires_grad=False)
