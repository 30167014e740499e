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
from backquant.lower.kernels.embedding import QuantizedEmbedding, QuantizedEmbeddingBag
from backquant.lower.kernels.engine_setting import packing_for
from backquant.lower.kernels.linear import OnednnLinear
from backquant.lower.kernels.linear_dynamic import DynamicLinear
from backquant.lower.kernels.lowbit import GroupedTable, LowbitLinear
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.kernels.recurrent import QuantizedCell, QuantizedRecurrent
from backquant.lower.qdq import dynamic_input, is_dequantize, is_quantize
from backquant.nn.quantized import dynamic
from backquant.nn.quantized.scaled import SIGNED, Weighted, moved
from backquant.runtime.dialect_operators import PackedWeight

_TABLES = (QuantizedEmbedding, QuantizedEmbeddingBag)
#: Kernels that stand for a module and nothing else.
WHOLE = (*_TABLES, GroupedTable, QuantizedRecurrent, QuantizedCell)
_LINEAR = (DynamicLinear, LowbitLinear)
_TO_FLOATS = (OnednnLinear, OnednnConv)
_TENSORS = ("weight_scale", "weight_zero_point")


class Layer(NamedTuple):
    """A layer that gives floats: the node of the layer itself, what it reads (floats, or the quantize node
    of integers), its kernel."""

    node: fx.Node
    source: fx.Node
    kernel: Any

    @property
    def is_dynamic(self) -> bool:
        """Whether it reads floats."""
        return isinstance(self.kernel, _LINEAR)


def kernels_by_node(graph_module: fx.GraphModule) -> dict[str, nn.Module]:
    """The kernels between floats of a lowered model, and those from integers to floats, by the last node of
    the reference model that each computes."""
    suffix, kinds = "_lowered", (*_LINEAR, *WHOLE, *_TO_FLOATS)
    paths = {path for path, module in graph_module.named_modules() if isinstance(module, kinds)}
    nodes = (node for node in graph_module.graph.nodes if node.target in paths) if paths else ()
    return {
        node.name.removesuffix(suffix): graph_module.get_submodule(str(node.target))
        for node in nodes
        if node.op == "call_module" and node.name.endswith(suffix)
    }


def layer_of(last: fx.Node, kernel: Any, is_relu: bool) -> Layer | None:
    """The layer whose last operator is ``last``, itself or a function that its kernel computes, too;
    ``is_relu``: that is a ReLU of its own."""
    is_dynamic = isinstance(kernel, _LINEAR)
    if not is_dynamic and not kernel.config.out_dtype.is_floating_point:
        return None
    is_fused = is_relu or _post_op(kernel) not in ("none", "relu")
    node: Any = last.args[0] if is_fused and last.args else last
    argument: Any = node.args[0] if node.args else node.kwargs.get("input")
    if is_dynamic:
        x = dynamic_input(argument)
        is_linear = node.op == "call_module" or node.target is F.linear
        return Layer(node, argument if x is None else x.source, kernel) if is_linear else None
    if not is_dequantize(argument) or not is_quantize(argument.args[0]):
        return None
    return Layer(node, argument.args[0], kernel)


def _post_op(kernel: Any) -> str:
    return getattr(kernel.config, "post_op", "none")


def dynamic_module(kernel: nn.Module, module: Any) -> Weighted:
    """What a module with this kernel is shown as: a layer, a table of embeddings, a recurrent layer."""
    name = type(module).__name__
    if isinstance(kernel, _LINEAR):
        name = "LinearReLU" if _post_op(kernel) == "relu" else "Linear"
    made: Weighted = getattr(dynamic, name).from_reference(module)
    made.kernel = remade(kernel)
    return made


def remade(kernel: Any) -> Callable[[Mapping[str, Any]], Callable[..., torch.Tensor]]:
    """What makes a kernel like this one of other tensors, which have the names that they have in a module."""
    if isinstance(kernel, GroupedTable):
        return GroupedTable.of
    if isinstance(kernel, _TABLES):
        return partial(type(kernel).of, kernel.config)
    return partial(_made, type(kernel), kernel.config)


def _made(kind: Any, config: Any, tensors: Mapping[str, Any]) -> nn.Module:
    made: nn.Module = kind(config, {name: _as_stored(name, t) for name, t in tensors.items()})
    return made


def _as_stored(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is not None and name.endswith(("_scale", "_zero_point")):
        return tensor if tensor.dim() else tensor.reshape(-1)
    return tensor.float() if tensor is not None and name == "bias" else tensor


def call_of(kernel: Any) -> tuple[Any, PackedWeight, tuple[Any, ...]]:
    """For a function: what is called in its place, the packed weight, and what follows it."""
    post_op = _post_op(kernel)
    if not isinstance(kernel, DynamicLinear) or post_op not in ("none", "relu"):
        return to_floats, _weight_to_floats(kernel), ()
    numbers: list[Any] = [kernel.weight_scale, kernel.weight_zero_point, 0]
    if numbers[0].numel() == 1:
        numbers = [float(numbers[0]), int(numbers[1]), None]
    scale, zero_point, axis = numbers
    packed = PackedWeight("linear", kernel.weight, scale, zero_point, axis, kernel.bias, ())
    packed.packing = partial(packing_for, kernel.config.engine)
    half = kernel.config.weight_dtype == torch.float16
    name = f"linear{'_relu' if post_op == 'relu' else ''}_dynamic{'_fp16' if half else ''}"
    rest = () if half else (kernel.config.reduce_range,)
    return getattr(torch.ops.quantized, name), packed, rest


# From integers to floats.


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


def _weight_to_floats(kernel: Any) -> KernelWeight:
    """The weight of a function with this kernel, which ``to_floats`` reads."""
    is_dynamic = isinstance(kernel, _LINEAR)
    kind = "linear" if is_dynamic else kernel.kernel
    again = remade(kernel) if is_dynamic else partial(_to_floats, type(kernel), kernel.config)
    zero_point = getattr(kernel, "weight_zero_point", torch.zeros(1, dtype=torch.int64))
    tensors = kernel.weight, kernel.weight_scale, zero_point, 0, kernel.bias
    return KernelWeight(kind, *tensors, (), of_kernel=again)


def to_floats(x: torch.Tensor, packed: Callable[..., torch.Tensor]) -> torch.Tensor:
    """``F.linear``, or a convolution, of floats or a quantized tensor and a packed weight, in float."""
    return packed(x)
