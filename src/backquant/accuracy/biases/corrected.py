"""Biases by which the channels of quantized layers get back the means that they have in the float model.

1. The mean error of a channel is estimated twice: from the weights, ``(W_q - W) E[x]`` with the float means
   of what the layer reads; and as measured, with all layers before it quantized and corrected. The second
   varies from batch to batch: of the difference of the two that share is added that is more than chance over
   all channels of a layer (James and Stein). On one batch the first alone is taken.
2. The outputs of batches that nothing was fitted on decide: all layers are corrected, or all but those whose
   results no other layer reads (what follows them may be a sigmoid, for which the mean says little), or none.

Sources: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019
(arXiv 1906.04721), 4.2 and appendix D; James and Stein, "Estimation with Quadratic Loss", 1961.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from backquant.accuracy.biases.layers import LayerCall, Seen, channel_means, layer_calls
from backquant.accuracy.figures import decibel_text, decibels, float_tensors
from backquant.accuracy.outputs import losses_of
from backquant.accuracy.recipes.bench import helps
from backquant.accuracy.recipes.draft import Layer
from backquant.accuracy.reference_run import Plan, Run, placeholders
from backquant.accuracy.rounding import Grid, columns, mean_error
from backquant.calibrate.feed import measured_inputs
from backquant.graph.clone import with_own_state
from backquant.graph.edit import weighted_part

#: The share of the loss that a correction must take away.
LEAST_GAIN = 0.03


@dataclass(frozen=True)
class Corrected:
    """The new biases by the path of the layer, none where they do not help; of how many layers; and SQNR of
    the outputs in dB on the batches that judge, without and with them."""

    biases: dict[str, torch.Tensor]
    layers: int
    before: float
    after: float

    @property
    def changes(self) -> bool:
        """Whether any is kept."""
        return bool(self.biases)

    def __str__(self) -> str:
        kept = f"{len(self.biases)} of {self.layers} changes kept"
        return f"biases: {decibel_text(self.before)} → {decibel_text(self.after)}, {kept}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as that of a step of a recipe."""
        gained = {"before": self.before, "after": self.after}
        return {"step": "biases", **gained, "kept": len(self.biases), "proposed": self.layers}


def corrected_biases(
    prepared: fx.GraphModule, reference: fx.GraphModule, fitting: list[Seen], judging: list[Seen]
) -> Corrected | None:
    """The biases that the layers of ``reference`` should have; ``None`` where it has no such layers, or no
    outputs to judge by."""
    layers = layer_calls(prepared, reference, fitting)
    if not layers or not all(seen.outputs for seen in judging):
        return None
    with torch.no_grad(), with_own_state(reference):
        plan = Plan(reference)
        measured = measured_inputs(prepared)
        inputs = [placeholders(prepared, seen.batch, 0, measured) for seen in judging]
        plain, every = ([Run(reference, plan, one) for one in inputs] for _ in range(2))
        fitted: list[Run] = []
        if len(fitting) > 1:
            inputs = [placeholders(prepared, seen.batch, 0, measured) for seen in fitting]
            fitted = [Run(reference, plan, one) for one in inputs]
        inner: list[Run] = []
        biases: dict[str, torch.Tensor] = {}
        for node in reference.graph.nodes:
            layer = layers.get(node.name)
            if layer is None:
                for run in (*fitted, *plain, *every, *inner):
                    run.step(node)
                continue
            if layer.is_last and not inner:
                inner = [run.fork() for run in every]
            _through(layer, fitting, fitted, (plain, every, inner), biases)
    return _judged(judging, layers, biases, plain, every, inner)


def _through(
    layer: LayerCall,
    fitting: list[Seen],
    fitted: list[Run],
    judged: tuple[list[Run], list[Run], list[Run]],
    biases: dict[str, torch.Tensor],
) -> None:
    """Run a layer, and note its new bias. The plain runs go without, the inner ones if it is a last layer."""
    plain, every, inner = judged
    part = layer.in_float()
    left = [*plain, *inner] if layer.is_last else plain
    for run in left:
        run.set(layer.node, layer.activated(layer.before_activation(part, run)))
    results = [layer.before_activation(part, run) for run in fitted]
    error = _mean_error(layer, part.weight, fitting, results).nan_to_num(0.0, 0.0, 0.0)
    for run, result in zip(fitted, results, strict=True):
        run.set(layer.node, layer.activated(result.sub_(layer.spread(error))))
    own = torch.zeros_like(error) if part.bias is None else part.bias.detach().double()
    biases[layer.path] = bias = (own - error).to(part.weight.dtype)
    part._parameters["bias"] = nn.Parameter(bias, requires_grad=False)
    for run in every if layer.is_last else [*every, *inner]:
        run.set(layer.node, layer.activated(layer.before_activation(part, run)))


def _mean_error(
    layer: LayerCall, weight: torch.Tensor, fitting: list[Seen], results: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Rule 1."""
    reads = torch.stack([seen.reads[layer.path] for seen in fitting]).mean(0)
    by_weights = _by_weights(layer, weight, reads)
    if not results:
        return by_weights
    axis = 1 - weight.dim()
    pairs = zip(results, fitting, strict=True)
    errors = torch.stack([channel_means(one, axis) - seen.gives[layer.path] for one, seen in pairs])
    more = errors.mean(0) - by_weights
    chance, power = errors.var(0).sum() / len(errors), more.square().sum()
    return by_weights + more * (1 - chance / power).clamp(min=0) if power > 0 else by_weights


def _by_weights(layer: LayerCall, weight: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
    wrong = weight - layer.float_part.weight.detach()
    return mean_error(wrong, reads, int(getattr(layer.float_part, "groups", 1)))


def _judged(
    judging: list[Seen],
    layers: dict[str, LayerCall],
    biases: dict[str, torch.Tensor],
    *runs: list[Run],
) -> Corrected:
    """Rule 2."""
    wanted = [seen.outputs for seen in judging]
    found = [[float_tensors(run.output()) for run in some] for some in runs]
    before, *tried = (losses_of(wanted, one) for one in found if one)
    last = {layer.path for layer in layers.values() if layer.is_last}
    best, chosen = before, dict[str, torch.Tensor]()
    for losses, left in zip(tried, (frozenset[str](), last), strict=False):
        gained = float((before - losses).sum())
        if (
            helps(before, losses)
            and gained >= LEAST_GAIN * float(before.sum())
            and float(losses.sum()) < float(best.sum())
        ):
            best = losses
            chosen = {path: bias for path, bias in biases.items() if path not in left}
    return Corrected(
        chosen, len(biases), decibels(float(before.sum())), decibels(float(best.sum()))
    )


# Rows of weights whose scale is set by what reads next to nothing.
#
# A row (output channel) has one scale, which follows its largest weight. Where that reads a channel that is
# hardly ever there, the row is rounded far more coarsely than the channels need that carry something.
#
# 1. A row that is cut at a share of its range loses two powers at its output: a twelfth of the square of a
# step    times the mean square of each channel that it reads; and no more than the square of the sum of
# what is cut    off of each weight, times the root of that mean square (as if all these channels moved
# together). 2. A channel counts as a hundredth of the layer's mean size at least: what calibration has not
# shown may come. 3. Rows that keep ``WORTH`` of their loss at half their range are cut, at the share with
# which they lose    least. That takes a few operations for each weight, and more for these rows alone.
#
# So a row loses less on what calibration has shown, whatever the model makes of it, and no run is needed.


#: What at most is left of the loss of a row that is cut at half its range.
WORTH = 0.6
_HALF = 0.5
_FLOOR = 1e-4  # of the mean square
_SHARES = tuple(1 - 0.04 * step for step in range(1, 16))  # of a scale, down to 0.4


@dataclass(frozen=True)
class CutRows:
    """Weight qparams with smaller scales by the path of the layer, and how many rows these are for."""

    qparams: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rows: int = 0

    @property
    def changes(self) -> bool:
        """Whether there are any."""
        return bool(self.qparams)

    def __str__(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return f"{rows} of weights cut, of which the largest read next to nothing: {', '.join(self.qparams)}"


def cut_rows(
    prepared: fx.GraphModule, reference: fx.GraphModule, squares: Mapping[str, Tensor]
) -> CutRows:
    """Cut rows of ``reference``, in place. ``squares``: summed over all values of each channel that a layer
    reads, by its path."""
    qparams, count = {}, 0
    with torch.no_grad():
        for call in layer_calls(prepared, reference, []).values():
            layer = Layer(call.path, (call.node,), call.float_part, weighted_part(call.called))
            share = shares(layer, squares[call.path]) if call.path in squares else None
            if share is not None:
                own = layer.qparams()
                qparams[layer.path] = {**own, "scale": own["scale"] * share}
                layer.reference._store_weight(layer.weight, qparams[layer.path])
                count += int((share < 1).sum())
    return CutRows(qparams, count)


def shares(layer: Layer, squares: Tensor) -> Tensor | None:
    """By how much the scale of each row shrinks, at most 1; ``None`` where none is cut, or where rows have no
    scales of their own."""
    scale: Tensor = layer.reference.weight_scale
    is_by_row = scale.dim() == 1 and scale.numel() == layer.weight.shape[0]
    if not is_by_row or layer.reference.weight_axis != 0 or not bool(squares.sum() > 0):
        return None
    weight, power = columns(layer.weight, layer.groups), _powers(layer, squares)
    grid = layer.grid()
    worth = left_at_half(weight, power, grid) < WORTH
    if not bool(worth.any()):
        return None
    share = torch.ones(weight.shape[:2], device=weight.device)
    for group, rows in enumerate(worth):
        own = replace(grid, scale=grid.scale[group, rows], zero_point=grid.zero_point[group, rows])
        share[group, rows] = _best(weight[group, rows], power[group], own)
    return share.flatten()


def _powers(layer: Layer, squares: Tensor) -> Tensor:
    """The power of what each column reads, of 1 in the mean: ``(groups, columns)``. Rule 2."""
    power = (squares / squares.mean()).nan_to_num(0.0, 0.0, 0.0)
    power = power.clamp(min=_FLOOR).to(layer.weight.dtype)
    taps = layer.weight[0, 0].numel()
    return power.reshape(layer.groups, -1).repeat_interleave(taps, -1)


def left_at_half(weight: Tensor, power: Tensor, grid: Grid) -> Tensor:
    """What is left of the loss of each row at half its range: ``(groups, rows)``.

    Args:
        weight: ``(groups, rows, columns)``.
        power: ``(groups, columns)``.

    >>> weight, zero = torch.tensor([[[0.1, 0.3, 8.0]]]), torch.zeros(1, 1, 3)
    >>> grid = Grid(torch.full((1, 1, 3), 0.1), zero, -80, 80)
    >>> left_at_half(weight, torch.tensor([[1.0, 1.0, 0.0]]), grid)
    tensor([[0.2500]])
    >>> left_at_half(weight, torch.tensor([[0.0, 0.0, 1.0]]), grid) > 1
    tensor([[True]])
    """
    size = weight.abs()
    over = size.sub_(_HALF * size.amax(-1, keepdim=True)).clamp_(min=0)
    cut_off = (over @ power.sqrt().unsqueeze(-1)).squeeze(-1).square()
    rounded = grid.scale[..., 0].square() / 12 * power.sum(-1, keepdim=True)
    return torch.where(over.any(-1), _HALF**2 + cut_off / rounded.clamp(min=1e-30), 1.0)


def _best(weight: Tensor, power: Tensor, grid: Grid) -> Tensor:
    """The share with which each row of ``(rows, columns)`` loses least."""
    found = [(1.0, _loss(weight, power, grid))]
    for share in _SHARES:
        found.append((share, _loss(weight, power, replace(grid, scale=grid.scale * share))))
    best = torch.stack([loss for _, loss in found]).argmin(0)
    return torch.tensor([share for share, _ in found], device=weight.device)[best]


def _loss(weight: Tensor, power: Tensor, grid: Grid) -> Tensor:
    """Rule 1, with the errors that rounding makes."""
    error = (grid.nearest(weight) - weight).abs()
    is_cut = error > 0.51 * grid.scale
    rounded = error.masked_fill(is_cut, 0.0).square() @ power
    cut_off = error.masked_fill(~is_cut, 0.0) @ power.sqrt()
    return rounded + cut_off.square()
