"""Layers of PyTorch's quantized dialect that are shown by the kernels that were chosen for them.

1. Kernels for what is quantized at each call compute otherwise than the reference model (their ranges have
   one bit less, say), tables of embeddings have a layout of their own, and a layer that reads integers and
   gives floats sums the integers: a module of ``backquant.nn.quantized`` runs the kernel, made again of the
   tensors that the module has.
2. Such a module has no scale where it reads integers and gives floats. A function has a packed weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

from backquant.lower.kernels.conv import OnednnConv
from backquant.lower.kernels.embedding import (
    EmbeddingConfig,
    QuantizedEmbedding,
    QuantizedEmbeddingBag,
    rowwise_table,
)
from backquant.lower.kernels.engine_setting import packing_for
from backquant.lower.kernels.linear import OnednnLinear
from backquant.lower.kernels.linear_dynamic import DynamicLinear, DynamicLinearConfig
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.kernels.recurrent import QuantizedCell, QuantizedRecurrent
from backquant.lower.qdq import dynamic_input, is_dequantize, is_quantize
from backquant.nn.quantized import dynamic
from backquant.nn.quantized.scaled import SIGNED, Weighted, moved
from backquant.runtime.dialect_operators import PackedWeight

_EMBEDDINGS: dict[type, type[dynamic.Embedding]] = {
    QuantizedEmbedding: dynamic.Embedding,
    QuantizedEmbeddingBag: dynamic.EmbeddingBag,
}
_RECURRENT = (QuantizedRecurrent, QuantizedCell)
_TO_FLOATS = (OnednnLinear, OnednnConv)
_TENSORS = ("weight_scale", "weight_zero_point")


class Layer(NamedTuple):
    """A layer that is quantized at each call: the node of the layer itself, what it reads, its kernel."""

    node: fx.Node
    source: fx.Node
    kernel: DynamicLinear


def kernels_by_node(graph_module: fx.GraphModule) -> dict[str, nn.Module]:
    """The kernels between floats of a lowered model, and those from integers to floats, by the last node of
    the reference model that each computes."""
    suffix, kinds = "_lowered", (DynamicLinear, *_EMBEDDINGS, *_RECURRENT, *_TO_FLOATS)
    paths = {path for path, module in graph_module.named_modules() if isinstance(module, kinds)}
    nodes = (node for node in graph_module.graph.nodes if node.target in paths) if paths else ()
    return {
        node.name.removesuffix(suffix): graph_module.get_submodule(str(node.target))
        for node in nodes
        if node.op == "call_module" and node.name.endswith(suffix)
    }


def dynamic_layer(last: fx.Node, kernel: nn.Module | None, is_relu: bool) -> Layer | None:
    """The layer whose last operator is ``last``; ``is_relu``: that is a ReLU of its own."""
    if not isinstance(kernel, DynamicLinear) or kernel.config.post_op not in ("none", "relu"):
        return None
    node: Any = last.args[0] if is_relu else last
    if node.op == "call_function" and node.target is not F.linear:
        return None
    argument: Any = node.args[0] if node.args else node.kwargs["input"]
    x = dynamic_input(argument)
    return Layer(node, argument if x is None else x.source, kernel)


def dynamic_module(kernel: DynamicLinear, module: Any) -> dynamic.Linear:
    """What a module with this kernel is shown as."""
    kind = dynamic.LinearReLU if kernel.config.post_op == "relu" else dynamic.Linear
    made = kind.from_reference(module)
    made.kernel = partial(_linear, kernel.config)
    return made


def _linear(config: DynamicLinearConfig, tensors: Mapping[str, Any]) -> DynamicLinear:
    flat = {name: tensors[name].reshape(-1) for name in _TENSORS}
    bias = tensors["bias"]
    return DynamicLinear(
        config, {**tensors, **flat, "bias": None if bias is None else bias.float()}
    )


def dynamic_call(kernel: DynamicLinear) -> tuple[str, PackedWeight, tuple[Any, ...]]:
    """For a function: the word of ``torch.ops.quantized``, the packed weight, and what follows it."""
    c, half = kernel.config, kernel.config.weight_dtype == torch.float16
    relu, numbers = (
        ("_relu" if c.post_op == "relu" else ""),
        (kernel.weight_scale, kernel.weight_zero_point),
    )
    if numbers[0].numel() == 1:
        scale, zero_point, axis = float(numbers[0]), int(numbers[1]), None
        packed = PackedWeight("linear", kernel.weight, scale, zero_point, axis, kernel.bias, ())
    else:
        packed = PackedWeight("linear", kernel.weight, *numbers, 0, kernel.bias, ())
    packed.packing = partial(packing_for, c.engine)
    name = f"linear{relu}_dynamic{'_fp16' if half else ''}"
    return name, packed, () if half else (c.reduce_range,)


def embedding(kernel: nn.Module, module: Any) -> dynamic.Embedding | None:
    """What a table of embeddings with this kernel is shown as."""
    kind = _EMBEDDINGS.get(type(kernel))
    if kind is None or not isinstance(kernel, (QuantizedEmbedding, QuantizedEmbeddingBag)):
        return None
    made = kind.from_reference(module)
    made.kernel = partial(_table, type(kernel), kernel.config)
    return made


def _table(kind: Any, config: EmbeddingConfig, tensors: Mapping[str, Any]) -> nn.Module:
    rows = tensors["weight"].shape[0]
    scale, zero_point = (tensors[name].expand(rows) for name in _TENSORS)
    table = rowwise_table(tensors["weight"], scale, zero_point, config.bits)
    made: nn.Module = kind(config, table)
    return made


def recurrent(kernel: nn.Module, module: Any) -> nn.Module | None:
    """What a recurrent layer or cell with this kernel is shown as."""
    if not isinstance(kernel, _RECURRENT):
        return None
    made: Any = getattr(dynamic, type(module).__name__).from_reference(module)
    made.kernel = partial(_recurrent, type(kernel), kernel.config)
    shown: nn.Module = made
    return shown


def _recurrent(kind: Any, config: Any, tensors: Mapping[str, Any]) -> nn.Module:
    made: nn.Module = kind(
        config,
        {n: t.reshape(-1) if n.endswith(("_scale", "_point")) else t for n, t in tensors.items()},
    )
    return made


# From integers to floats.


class ToFloats(NamedTuple):
    """A layer that reads the integers of ``source``, a quantize node, and gives floats."""

    node: fx.Node
    source: fx.Node
    kernel: OnednnLinear | OnednnConv


def layer_to_floats(last: fx.Node, kernel: nn.Module | None, is_relu: bool) -> ToFloats | None:
    """The layer whose last operator is ``last``, itself or a function that its kernel computes, too;
    ``is_relu``: that is a ReLU of its own."""
    if not isinstance(kernel, _TO_FLOATS) or not kernel.config.out_dtype.is_floating_point:
        return None
    is_fused = is_relu or kernel.config.post_op not in ("none", "relu")
    node: Any = last.args[0] if is_fused and last.args else last
    argument: Any = node.args[0] if node.args else node.kwargs.get("input")
    if not is_dequantize(argument) or not is_quantize(argument.args[0]):
        return None
    return ToFloats(node, argument.args[0], kernel)


def module_to_floats(kind: type[Weighted], module: nn.Module, kernel: Any) -> Weighted:
    """What a module with this kernel is shown as: ``kind`` without a scale."""
    made = kind.from_reference(module)
    del made._buffers["scale"], made._buffers["zero_point"]
    made.kernel = partial(_to_floats, type(kernel), kernel.config)
    return made


def _to_floats(kind: Any, config: Any, tensors: Mapping[str, Any]) -> _ToFloats:
    weight, scale, zero_point = (tensors[name] for name in ("weight", *_TENSORS))
    return _ToFloats(kind, config, WeightTensors(weight, scale, zero_point, tensors["bias"]))


class _ToFloats:
    """Calls a kernel with the integers of a quantized tensor; made again for each other scale."""

    def __init__(self, kind: Any, config: Any, tensors: WeightTensors) -> None:
        self.kind, self.config, self.tensors = kind, config, tensors
        self.made: nn.Module | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = moved(x, SIGNED) if x.dtype == torch.qint8 else x
        config = replace(self.config, x_scale=x.q_scale(), x_zero_point=x.q_zero_point())
        made = self.made  # another thread may make another
        if made is None or made.config != config:
            made = self.made = self.kind(config, self.tensors)
        floats: torch.Tensor = made(x.int_repr())
        return floats


@dataclass
class KernelWeight(PackedWeight):
    """``of_kernel``: what computes a functional layer that reads integers and gives floats."""

    of_kernel: Callable[[Mapping[str, Any]], Callable[..., torch.Tensor]] | None = None

    def packed(self) -> Any:
        """A function of quantized tensors."""
        if self._packed is None:
            assert self.of_kernel is not None
            names = ("weight", *_TENSORS, "bias")
            tensors = self.integers, self.scale, self.zero_point, self.bias
            self._packed = self.of_kernel(dict(zip(names, tensors, strict=True)))
        return self._packed


def weight_to_floats(kernel: Any) -> KernelWeight:
    """The weight of a function with this kernel, which ``to_floats`` reads."""
    tensors = kernel.weight, kernel.weight_scale, kernel.weight_zero_point, 0, kernel.bias
    return KernelWeight(
        kernel.kernel, *tensors, (), of_kernel=partial(_to_floats, type(kernel), kernel.config)
    )


def to_floats(x: torch.Tensor, packed: Callable[..., torch.Tensor]) -> torch.Tensor:
    """``F.linear``, or a convolution, of a quantized tensor and a packed weight, in float."""
    return packed(x)
