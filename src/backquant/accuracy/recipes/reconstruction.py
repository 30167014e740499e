"""Weights and biases that are trained until a part of the model gives what it gives in float.

No labels are needed: the float model is the teacher. Scales and zero points stay, so that the same kernels
run. Rounding passes gradients on as if it were not there, within the range ("straight through").
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from backquant.accuracy.figures import float_tensors
from backquant.accuracy.recipes.bench import Bench
from backquant.accuracy.recipes.draft import (
    Change,
    Draft,
    Layer,
    Together,
    layers_of,
)
from backquant.accuracy.reference_run import last_uses, run_node
from backquant.accuracy.rounding import columns
from backquant.dtypes import ObservedQParams
from backquant.graph import get_module, rebuilt, set_module, shallow_copy
from backquant.graph.edit import weighted_part
from backquant.prepare import PreparedModule, prepared_state

_STEPS = 100  # of gradient descent, for each part
_RATE = 0.02  # of the weights, in steps of their grid
_BIAS = 0.002  # of the biases, in standard deviations of what the layer gives
_LAYERS = 2  # of a block, at least

Values = dict[str, Any]


def blocks(draft: Draft, bench: Bench) -> Iterator[Together]:
    """Train block by block, each on the results of the blocks before it, which are trained already. A block
    has two layers or more, and ends where one value alone is read further on, for example after a residual
    addition.

    Source: Li et al., "BRECQ: Pushing the Limit of Post-Training Quantization by Block Reconstruction", 2021
    (arXiv 2102.05426), with all samples weighted equally, and both weights and biases trained.
    """
    sides = _Sides(draft, bench)
    start = 0
    for end in sides.ends():
        yield from sides.trained(start, end)
        start = end


def distillation(draft: Draft, bench: Bench) -> Iterator[Together]:
    """The whole model, so that its outputs are those of the float model.

    Source: Hinton et al., "Distilling the Knowledge in a Neural Network", 2015 (arXiv 1503.02531), with the
    outputs themselves as what is to be matched.
    """
    sides = _Sides(draft, bench)
    yield from sides.trained(0, len(sides.nodes))


class _Sides:
    """A draft twice: in float, and rounded with layers that can be trained. Both have the same nodes."""

    def __init__(self, draft: Draft, bench: Bench) -> None:
        twin = draft.twin()
        self.layers = {layer.path: layer for layer in layers_of(twin)}
        self.in_float = _with_sites(draft.prepared, {})
        self.rounded = _with_sites(draft.prepared_model(), twin.record.qparams)
        self.nodes = list(self.rounded.graph.nodes)
        reads = ((node.name, [n.name for n in node.all_input_nodes]) for node in self.nodes)
        self.last = last_uses(reads)
        self.depends = self._dependent()
        given = (twin.inputs(b, i) for i, b in enumerate(bench.fitting))
        self.values = [(dict(inputs), dict(inputs)) for inputs in given]
        self.spread: dict[str, float] = {}
        self.opened: set[str] = set()

    def _dependent(self) -> frozenset[str]:
        """The nodes whose values depend on a layer."""
        found: set[str] = set()
        for node in self.nodes:
            if node.target in self.layers or any(n.name in found for n in node.all_input_nodes):
                found.add(node.name)
        return frozenset(found)

    def ends(self) -> Iterator[int]:
        """Where blocks end."""
        alive: set[str] = set()
        layers = 0
        for place, node in enumerate(self.nodes[:-1]):
            layers += node.target in self.layers
            alive |= {node.name} & self.depends
            alive.difference_update(self.last.get(node.name, ()))
            if layers >= _LAYERS and len(alive) == 1:
                layers = 0
                yield place + 1
        yield len(self.nodes)

    def trained(self, start: int, end: int) -> Iterator[Together]:
        """The changes of the layers between two places; goes on to ``end`` with them."""
        targets = []
        for values, _ in self.values:
            self._run(self.in_float, values, start, end)
            targets.append(self._results(values, end))
        paths = dict.fromkeys(str(node.target) for node in self.nodes[start:end])
        opened = [
            self._open(self.layers[p]) for p in paths if p in self.layers.keys() - self.opened
        ]
        if opened and self._descend(opened, targets, start, end):
            yield tuple(layer.change() for layer in opened)
        for _, values in self.values:
            self._run(self.rounded, values, start, end)

    def _open(self, layer: Layer) -> _Trained:
        module = copy.deepcopy(get_module(self.rounded, layer.path))
        set_module(self.rounded, layer.path, module)
        self.opened.add(layer.path)
        return _Trained(layer, weighted_part(module), self.spread[layer.path])

    def _run(self, module: fx.GraphModule, values: Values, start: int, end: int) -> None:
        for node in self.nodes[start:end]:
            if node.op != "placeholder":
                values[node.name] = run_node(module, node, lambda read: values[read.name])
            if module is self.in_float and node.target in self.layers:
                self.spread.setdefault(str(node.target), float(values[node.name].std()))
            for name in self.last.get(node.name, ()):
                values.pop(name, None)

    def _results(self, values: Values, end: int) -> list[Tensor]:
        """What a part of the model passes on: the model's outputs, or the values that are read after it."""
        if end == len(self.nodes):
            return float_tensors(values["output"])
        return float_tensors([values[name] for name in values if name in self.depends])

    def _descend(
        self, opened: Sequence[_Trained], targets: Sequence[list[Tensor]], start: int, end: int
    ) -> bool:
        """Train one part; whether there was anything to train: results that depend on the weights."""
        moved = [layer.weight.moved for layer in opened]
        shifts = [layer.bias.moved for layer in opened if layer.bias is not None]
        groups = [{"params": moved, "lr": _RATE}, {"params": shifts, "lr": _BIAS}]
        optimizer = torch.optim.Adam(groups)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
        with torch.enable_grad():
            for step in range(_STEPS):
                wanted, (_, before) = targets[step % len(targets)], self.values[step % len(targets)]
                values = dict(before)
                self._run(self.rounded, values, start, end)
                loss = _distance(wanted, self._results(values, end))
                if not (isinstance(loss, Tensor) and loss.requires_grad and loss.isfinite()):
                    return False
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                for tensor in (*moved, *shifts):  # roots have no slope at zero
                    if tensor.grad is not None:
                        tensor.grad.nan_to_num_(0.0, 0.0, 0.0)
                optimizer.step()
                schedule.step()
        return True


def _distance(wanted: Sequence[Tensor], found: Sequence[Tensor]) -> Any:
    """Relative error power, the sum over all tensors."""
    pairs = zip(wanted, found, strict=True)
    return sum((b - a).square().sum() / a.square().sum().clamp(min=1e-30) for a, b in pairs)


class _Trained:
    """A layer of the rounded side, with a weight that moves on its grid and a bias that moves."""

    def __init__(self, layer: Layer, part: Any, spread: float) -> None:
        self.layer, self.part = layer, part
        part.requires_grad_(False)
        self.weight = _OnGrid(layer, part.weight)
        parametrize.register_parametrization(part, "weight", self.weight)
        self.bias = None if part.bias is None else _Moved(part.bias, spread)
        if self.bias is not None:
            parametrize.register_parametrization(part, "bias", self.bias)

    def change(self) -> Change:
        """What was found."""
        weight = self.part.weight.detach().clone()
        bias = None if self.bias is None else self.part.bias.detach().clone()
        return Change(self.layer.path, weight=weight, qparams=self.layer.qparams(), bias=bias)


class _Moved(nn.Module):
    """A tensor and what is added to it, in units of ``spread``."""

    def __init__(self, tensor: Tensor, spread: Tensor | float) -> None:
        super().__init__()
        self.spread = spread
        self.moved = nn.Parameter(torch.zeros_like(tensor))

    def forward(self, tensor: Tensor) -> Tensor:
        return tensor + self.spread * self.moved


class _OnGrid(_Moved):
    """The same for a weight, in steps of its grid, and rounded to it."""

    def __init__(self, layer: Layer, weight: Tensor) -> None:
        grid = layer.grid().spread(columns(weight, layer.groups).shape)
        scale, zero_point = (t.reshape(weight.shape) for t in (grid.scale, grid.zero_point))
        super().__init__(weight, scale)
        self.low, self.high = ((end - zero_point) * scale for end in (grid.low, grid.high))

    def forward(self, tensor: Tensor) -> Tensor:
        return _rounded(super().forward(tensor), self.spread, self.low, self.high)


class _Rounding(nn.Module):
    """Rounds values to the qparams that an observer measured, in its place."""

    def __init__(self, found: ObservedQParams) -> None:
        super().__init__()
        assert found.scale is not None and found.zero_point is not None
        self.scale = found.scale.float()
        zero_point = found.zero_point.float()
        self.low = (found.quant_min - zero_point) * self.scale
        self.high = (found.quant_max - zero_point) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return _rounded(x, self.scale, self.low, self.high)


def _rounded(x: Tensor, scale: Any, low: Tensor, high: Tensor) -> Tensor:
    """``x`` rounded to multiples of ``scale``, within a range; gradients pass within it."""
    inside = torch.minimum(torch.maximum(x, low), high)
    made: Tensor = inside + (torch.round(inside / scale) * scale - inside).detach()
    return made


def _with_sites(prepared: fx.GraphModule, qparams: Mapping[str, ObservedQParams]) -> fx.GraphModule:
    """A copy whose observers round as they measured, or, without ``qparams``, do nothing. So do those that
    measure at each call, or each channel."""
    made = rebuilt(PreparedModule, prepared, shallow_copy(prepared))
    for site in prepared_state(prepared).sites.sites:
        found = qparams.get(site.name)
        is_static = found is not None and found.scale is not None and found.scale.numel() == 1
        rounding = _Rounding(found) if found is not None and is_static else nn.Identity()
        set_module(made, site.name, rounding)
    return made
