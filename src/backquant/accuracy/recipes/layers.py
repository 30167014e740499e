"""The quantized layers whose weights a recipe may change: their float and reference modules, and their
inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from backquant.accuracy.grid import Grid
from backquant.accuracy.recipes.draft import weighted_part
from backquant.accuracy.twin import Twin, Walk
from backquant.dtypes import block_of
from backquant.graph import get_module

_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Layer:
    """A quantized linear layer or convolution.

    ``nodes``: its calls. ``float_part``: the module with the float weight. ``reference``: the module with the
    integer weight.
    """

    path: str
    nodes: tuple[fx.Node, ...]
    float_part: Any
    reference: Any

    @property
    def groups(self) -> int:
        """The groups of a convolution; 1 for a linear layer."""
        return int(getattr(self.float_part, "groups", 1))

    @property
    def transposed(self) -> bool:
        """Whether it is a transposed convolution."""
        return isinstance(self.float_part, _TRANSPOSED)

    @property
    def weight(self) -> torch.Tensor:
        """The float weight."""
        found: torch.Tensor = self.float_part.weight.detach()
        return found

    @property
    def inputs(self) -> int:
        """How many values one output is a sum of."""
        return self.weight[0].numel()

    def qparams(self) -> dict[str, Any]:
        """The weight qparams of the reference module, as PyTorch's dict."""
        own = self.reference
        found = {
            "qscheme": own.weight_qscheme,
            "dtype": own.weight_dtype,
            "scale": own.weight_scale,
            "zero_point": own.weight_zero_point,
            "axis": own.weight_axis,
            "quant_min": own.weight_quant_min,
            "quant_max": own.weight_quant_max,
        }
        if own.weight_scale.dim() > 1:
            del found["axis"]
        return found

    def grid(self) -> Grid:
        """The scales and zero points that the weight is rounded to, in the shape of ``columns``."""
        own, shape = self.reference, self.weight.shape
        scale, zero_point = own.weight_scale.float(), own.weight_zero_point.float()
        if scale.dim() == 1:
            spread = [1] * len(shape)
            spread[own.weight_axis] = -1
            scale, zero_point = scale.reshape(spread), zero_point.reshape(spread)
        elif scale.dim() > 1:
            for axis, size in enumerate(block_of(shape, scale.shape) or ()):
                scale = scale.repeat_interleave(size, axis).narrow(axis, 0, shape[axis])
                zero_point = zero_point.repeat_interleave(size, axis).narrow(axis, 0, shape[axis])
        rows = (self.groups, shape[0] // self.groups, -1)
        scale, zero_point = (t.expand(shape).reshape(rows) for t in (scale, zero_point))
        return Grid(scale, zero_point, own.weight_quant_min, own.weight_quant_max)


def layers_of(twin: Twin, *, transposed: bool = False) -> Iterator[Layer]:
    """The layers whose module is quantized at each of its calls, in the order of the graph.

    ``transposed``: whether transposed convolutions are among them.
    """
    return _quantized(twin, (*_KINDS, *_TRANSPOSED) if transposed else _KINDS)


def tables_of(twin: Twin) -> Iterator[Layer]:
    """The embeddings that are quantized at each of their calls; a row of their weight is one of the table."""
    return _quantized(twin, (nn.Embedding, nn.EmbeddingBag))


def _quantized(twin: Twin, kinds: tuple[type[nn.Module], ...]) -> Iterator[Layer]:
    calls: dict[str, list[fx.Node]] = {}
    for node in twin.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    for path, nodes in calls.items():
        others = [twin.twins.get(node.name) for node in nodes]
        if any(node.name not in twin.of for node in nodes) or any(
            other is None or other.target != path for other in others
        ):
            continue
        part = weighted_part(get_module(twin.float_graph, path))
        reference: Any = weighted_part(get_module(twin.reference, path))
        scale = getattr(reference, "weight_scale", None)
        if not isinstance(part, kinds) or not isinstance(scale, torch.Tensor):
            continue
        if not reference.weight.is_floating_point() and "weight" in part._parameters:
            yield Layer(path, tuple(nodes), part, reference)


def input_of(walk: Walk, node: fx.Node) -> Any:
    """What a layer reads in a run: its first argument."""
    args, kwargs = walk.inputs_of(node)
    return args[0] if args else next(iter(kwargs.values()))
