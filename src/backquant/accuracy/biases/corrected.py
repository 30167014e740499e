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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from backquant.accuracy.biases.layer_statistics import Seen, channel_means
from backquant.accuracy.biases.layers import LayerCall, layer_calls
from backquant.accuracy.figures import decibel_text, decibels, float_tensors
from backquant.accuracy.grid import mean_error
from backquant.accuracy.nodes import placeholders
from backquant.accuracy.outputs import losses_of
from backquant.accuracy.recipes.bench import helps
from backquant.accuracy.reference_run import Plan, Run
from backquant.calibrate.feed import measured_inputs
from backquant.graph.clone import with_own_state

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
