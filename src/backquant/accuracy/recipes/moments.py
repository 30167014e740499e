"""Layers whose outputs get back, channel by channel, the mean or the variance that they have in the float
model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from backquant.accuracy.recipes.bench import Bench
from backquant.accuracy.recipes.draft import Change, Draft
from backquant.accuracy.recipes.layers import Layer, input_of, layers_of
from backquant.accuracy.twin import Twin, Walk

_MOST = 2.0  # by how much a channel is scaled
_BYTES = 256 << 20  # of values that wait, in float and quantized
_FEWEST = 4  # batches, of any size


def bias_correction(draft: Draft, bench: Bench) -> Iterator[Change]:
    """Subtract the mean error of each output channel from the bias, layer by layer in the order of the graph,
    so that each layer reads the results of layers that are corrected already.

    Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019
    (arXiv 1906.04721), appendix D, the empirical form.
    """
    for layer, wanted, found in _moments(draft, bench):
        yield _moved(layer, wanted, found)


def batch_norm(draft: Draft, bench: Bench) -> Iterator[Change]:
    """Give each output channel the mean and the variance that it has in the float model, as a batch norm
    behind the layer would whose statistics are those of the quantized model, folded into weight and bias.

    Integers of weights that have a scale for each channel stay what they are; others are rounded anew. A
    channel is scaled by a half to 2; those of transposed convolutions, which have one scale as a rule, get
    the mean alone. Source: Sun et al., "Hybrid 8-bit Floating Point (HFP8) Training and Inference for Deep
    Neural Networks", 2019 (statistics of batch norms are tuned anew for inference).
    """
    for layer, wanted, found in _moments(draft, bench):
        if layer.transposed:
            yield _moved(layer, wanted, found)
            continue
        ratio = (wanted.variance / found.variance.clamp(min=1e-30)).sqrt().clamp(1 / _MOST, _MOST)
        ratio = torch.where(wanted.variance > 0, ratio, torch.ones_like(ratio))
        bias = wanted.mean - ratio * (found.mean - _bias(layer).double())
        yield _scaled(layer, ratio.float(), bias.float())


def _moved(layer: Layer, wanted: _Moments, found: _Moments) -> Change:
    bias = _bias(layer) + (wanted.mean - found.mean).float()
    _set_bias(layer, bias)
    return Change(layer.path, bias=bias)


def _scaled(layer: Layer, ratio: Tensor, bias: Tensor) -> Change:
    own, qparams = layer.reference, layer.qparams()
    spread = ratio.reshape(-1, *[1] * (layer.weight.dim() - 1))
    weight = own.dequantized_weight() * spread  # as steps before rounded it
    _set_bias(layer, bias)
    scale = qparams["scale"]
    if scale.dim() == 1 and scale.numel() == ratio.numel() and qparams["axis"] == 0:
        qparams["scale"] = own.weight_scale = scale * ratio
    elif scale.dim() > 1:
        qparams["scale"] = own.weight_scale = scale * spread
    return Change(layer.path, weight=weight, qparams=qparams, bias=bias)


def _bias(layer: Layer) -> Tensor:
    bias = layer.reference.bias
    return torch.zeros((), device=layer.weight.device) if bias is None else bias.detach()


def _set_bias(layer: Layer, bias: Tensor) -> None:
    layer.reference.register_parameter("bias", nn.Parameter(bias, requires_grad=False))


@dataclass(frozen=True)
class _Moments:
    """The moments of each output channel, over all batches and positions."""

    mean: Tensor
    variance: Tensor


def _moments(draft: Draft, bench: Bench) -> Iterator[tuple[Layer, _Moments, _Moments]]:
    """Each layer that is called once, with its results in the float model and in the quantized one: in the
    order of the graph, so that what is done to a layer counts for those behind it.

    Walks over all batches wait at each layer for the others. Of batches that would take much memory so, some
    are taken."""
    twin = draft.twin()
    layers = {layer.nodes[0].name: layer for layer in layers_of(twin, transposed=True)}
    layers = {name: layer for name, layer in layers.items() if len(layer.nodes) == 1}
    batches = _spread(bench, twin, list(layers.values()))
    in_float = list(bench.walks(twin, lambda _: False, batches))
    quantized = list(bench.walks(twin, lambda _: True, batches))
    for node in twin.nodes:
        layer = layers.get(node.name)
        if layer is not None:
            wanted = _summed(layer, layer.float_part, node, in_float)
            yield layer, wanted, _summed(layer, layer.reference, node, quantized)


def _spread(bench: Bench, twin: Twin, layers: Sequence[Layer]) -> list[Any]:
    """As many of the batches as are in memory at once, evenly spread; what waits is measured on the first."""
    batches, waiting = bench.fitting, 0
    for walk in bench.walks(twin, lambda _: True, batches[:1]):
        for layer in sorted(layers, key=lambda layer: twin.place[layer.nodes[0].name]):
            walk.to(twin.place[layer.nodes[0].name])
            input_of(walk, layer.nodes[0])
            waiting = max(waiting, walk.held_bytes())
    count = max(_FEWEST, _BYTES // max(1, 2 * waiting))
    step = max(1.0, len(batches) / count)
    return [batches[int(index * step)] for index in range(min(count, len(batches)))]


def _summed(layer: Layer, module: Any, node: fx.Node, walks: Sequence[Walk]) -> _Moments:
    axis = -1 if isinstance(layer.float_part, nn.Linear) else 1
    sums: Any = 0.0
    squares: Any = 0.0
    count = 0
    for walk in walks:
        walk.to(walk.twin.place[node.name])
        values = module(input_of(walk, node)).movedim(axis, 0).unsqueeze(-1).flatten(1)
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        variance, mean = torch.var_mean(values, 1, correction=0)
        sums = sums + mean.double() * values.shape[1]
        squares = squares + (variance.double() + mean.double().square()) * values.shape[1]
        count += values.shape[1]
    mean = sums / max(count, 1)
    return _Moments(mean, (squares / max(count, 1) - mean.square()).clamp(min=0))
