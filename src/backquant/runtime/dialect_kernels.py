"""Layers between floats in PyTorch's quantized dialect, by the kernels that were chosen for them.

Kernels for what is quantized at each call compute otherwise than the reference model (their ranges have one
bit less, say), and tables of embeddings have a layout of their own: so what is shown runs the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

from backquant.lower.dynamic import dynamic_input
from backquant.lower.kernels.embedding import (
    EmbeddingConfig,
    QuantizedEmbedding,
    QuantizedEmbeddingBag,
    rowwise_table,
)
from backquant.lower.kernels.engine_setting import packing_for
from backquant.lower.kernels.linear_dynamic import DynamicLinear, DynamicLinearConfig
from backquant.nn.quantized import dynamic
from backquant.runtime.packed_weights import PackedWeight

_EMBEDDINGS: dict[type, type[dynamic.Embedding]] = {
    QuantizedEmbedding: dynamic.Embedding,
    QuantizedEmbeddingBag: dynamic.EmbeddingBag,
}
_TENSORS = ("weight_scale", "weight_zero_point")


class Layer(NamedTuple):
    """A layer that is quantized at each call: the node of the layer itself, what it reads, its kernel."""

    node: fx.Node
    source: fx.Node
    kernel: DynamicLinear


def kernels_by_node(graph_module: fx.GraphModule) -> dict[str, nn.Module]:
    """The kernels between floats of a lowered model, by the last node of the reference model that each
    computes."""
    suffix, kinds = "_lowered", (DynamicLinear, *_EMBEDDINGS)
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
