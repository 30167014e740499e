"""A lowered model in PyTorch's words, so that its graph can be judged by PyTorch's tests.

Both sides are brought to one vocabulary:

- ``quantize``, ``dequantize``: ``torch.quantize_per_tensor`` and the method ``dequantize``; ours are
  functions of ``backquant.lower.kernels.boundary``. ``requantize`` is both; ``saturate`` (a narrower
  range than the dtype's) has no counterpart and no word, nor has what puts integers into a quantized
  tensor for a custom module, or takes them out.
- ``quantized conv2d_relu``: ``nniq.ConvReLU2d`` and ``torch.ops.quantized.conv2d_relu`` alike, since
  ours is one kernel whether a module or a function was called. ``dynamic linear``: likewise. Where a test
  counts ``torch.ops.quantized.linear``, kernels at a module's path do not count.
- ``to``, ``dequantize``: also the conversions to float16 and back.
- an operator that PyTorch runs unchanged on quantized tensors, or in float: its name, whichever way it is
  spelled (module, function or method). Ours is a kernel, a table of 256 results, or the operator
  itself on integers.
- anything else: the target itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.ao.nn.intrinsic.quantized as nniq
import torch.ao.nn.intrinsic.quantized.dynamic as nniqd
import torch.ao.nn.quantized as nnq
import torch.ao.nn.quantized.dynamic as nnqd
from torch import nn
from torch.fx import GraphModule, Node

from backquant.lower.kernels.configured import KernelModule
from backquant.operators import find
from backquant.runtime import QuantizedModel

__all__ = ["is_lowered", "same_words", "type_in_torch", "words_of"]

_STATIC: dict[type, str] = {
    nnq.Linear: "linear",
    **{getattr(nnq, f"Conv{n}d"): f"conv{n}d" for n in (1, 2, 3)},
    **{getattr(nnq, f"ConvTranspose{n}d"): f"conv_transpose{n}d" for n in (1, 2, 3)},
    **{getattr(nnq, f"BatchNorm{n}d"): f"batch_norm{n}d" for n in (2, 3)},
    **{getattr(nnq, f"InstanceNorm{n}d"): "instance_norm" for n in (1, 2, 3)},
    nnq.LayerNorm: "layer_norm",
    nnq.GroupNorm: "group_norm",
    nnq.ELU: "elu",
    nnq.Hardswish: "hardswish",
    nnq.LeakyReLU: "leaky_relu",
    nnq.PReLU: "prelu",
    nnq.Softmax: "softmax",
    nnq.Sigmoid: "sigmoid",
    nnq.Embedding: "embedding",
    nnq.EmbeddingBag: "embedding_bag",
    **{getattr(nniq, f"ConvReLU{n}d"): f"conv{n}d_relu" for n in (1, 2, 3)},
    **{getattr(nniq, f"BNReLU{n}d"): f"batch_norm{n}d_relu" for n in (2, 3)},
    nniq.LinearReLU: "linear_relu",
    nniq.LinearLeakyReLU: "linear_leaky_relu",
    nniq.LinearTanh: "linear_tanh",
    nniq.ConvAdd2d: "conv2d_add",
    nniq.ConvAddReLU2d: "conv2d_add_relu",
}
_DYNAMIC: dict[type, str] = {
    nnqd.Linear: "linear",
    nniqd.LinearReLU: "linear_relu",
    nnqd.LSTM: "lstm",
    nnqd.GRU: "gru",
    nnqd.LSTMCell: "lstm_cell",
    nnqd.GRUCell: "gru_cell",
    nnqd.RNNCell: "rnn_cell",
}
_CLASSES: dict[type, str] = {
    **{cls: f"quantized {name}" for cls, name in _STATIC.items()},
    **{cls: f"dynamic {name}" for cls, name in _DYNAMIC.items()},
}
_BY_WORD: dict[str, type] = {word: cls for cls, word in reversed(_CLASSES.items())}
_BOUNDARIES: dict[str, tuple[str, ...]] = {
    "quantize": ("quantize",),
    "dequantize": ("dequantize",),
    "requantize": ("dequantize", "quantize"),
    "saturate": (),
    "quantized_tensor": (),
    "integers_of": (),
}
_QUANTIZED = frozenset(["add", "add_relu", "mul", "mul_relu", "matmul", "softmax"])
_TABLES = frozenset(["elu", "hardswish", "leaky_relu", "prelu", "celu"])


class _Types(type):
    """``isinstance(x, type_in_torch)`` is ``isinstance(x, type)``."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)


class type_in_torch(type, metaclass=_Types):
    """``type``, but of a kernel module the class of ``torch.ao.nn.quantized`` that it stands for."""

    def __new__(cls, *given: Any) -> Any:
        if len(given) == 1 and isinstance(given[0], KernelModule):
            (word,) = _of_kernel(given[0])
            return _BY_WORD.get(word, type(given[0]))
        return type(*given)

    def __class_getitem__(cls, item: Any) -> Any:
        return type[item]


def is_lowered(model: Any) -> bool:
    """Whether ``model`` is a lowered one, or the standalone part of one.

    >>> is_lowered(torch.fx.symbolic_trace(nn.ReLU()))
    False
    """
    if isinstance(model, QuantizedModel):
        return True
    if not isinstance(model, GraphModule):
        return False
    homes = (getattr(node.target, "__module__", None) or "" for node in model.graph.nodes)
    kernels = any(isinstance(module, KernelModule) for module in model.modules())
    return kernels or any(home.startswith("backquant.lower.kernels.") for home in homes)


def words_of(model: QuantizedModel | GraphModule) -> list[str]:
    """The words of a lowered model's operators, in graph order."""
    graph_module = model.graph_module if isinstance(model, QuantizedModel) else model
    return [word for node in graph_module.graph.nodes for word in _of_node(graph_module, node)]


def _of_modules(model: QuantizedModel | GraphModule) -> list[str]:
    """The words of weighted kernels that stand where a module stood."""
    graph_module = model.graph_module if isinstance(model, QuantizedModel) else model
    nodes = (node for node in graph_module.graph.nodes if node.op == "call_module")
    own = (node for node in nodes if not str(node.target).rstrip("_").endswith("_kernel"))
    words = (word for node in own for word in _of_node(graph_module, node))
    return [word for word in words if word.startswith(("quantized linear", "quantized conv"))]


def _of_node(graph_module: GraphModule, node: Node) -> Iterator[str]:
    if node.op == "call_module":
        module = graph_module.get_submodule(str(node.target))
        yield from (
            _of_kernel(module) if isinstance(module, KernelModule) else (_plain(type(module)),)
        )
    elif node.op in ("call_function", "call_method"):
        target: Any = node.target
        home = getattr(target, "__module__", None) or ""
        if _is_float_of_half(node):
            yield "dequantize"
        elif not home.startswith("backquant.lower.kernels."):
            yield _plain(target)
        elif target.__name__ == "clamp" and node.args[2] in (127, 255):
            yield "relu"
        elif home.endswith(".boundary"):
            yield from _BOUNDARIES[target.__name__]
        elif target.__name__ in _QUANTIZED:
            yield f"quantized {target.__name__}"
        else:
            name = target.__name__
            yield _plain(getattr(nn.functional, name, None) or getattr(torch, name))


def _is_float_of_half(node: Node) -> bool:
    """Whether a node makes float32 of float16, which PyTorch's reference models write ``dequantize``."""
    converts = str(node.target).startswith("quantized_decomposed.convert_element_type")
    return converts and node.args[1] == torch.float32


def _of_kernel(module: KernelModule) -> tuple[str, ...]:
    """The word of a kernel, from its configuration."""
    kind, config = type(module).__name__, module.config
    post = getattr(config, "post_op", "none")
    behind = "" if post == "none" else f"_{post}"
    if kind == "Lookup":
        name = config.operator.replace("+", "_").replace("leakyrelu", "leaky_relu")
        return (f"quantized {name}" if name in _TABLES | _QUANTIZED else name,)
    if kind == "QuantizedWeighted":
        return (f"quantized {config.operator}",)
    if kind == "OnednnConv":
        return (f"quantized conv{len(config.stride)}d{behind}",)
    if kind == "OnednnConvAdd":
        return (f"quantized conv2d_add{'_relu' if config.relu else ''}",)
    if kind == "OnednnLinear":
        return (f"quantized linear{behind}",)
    if kind == "DynamicLinear":
        return (f"dynamic linear{behind}",)
    if kind == "QuantizedRecurrent":
        return (f"dynamic {config.kind}",)
    if kind == "QuantizedCell":
        return (f"dynamic {config.kind.split('_')[0]}_cell",)
    if kind == "BatchNorm":
        return (f"quantized {module.name.partition('.')[2]}",)
    if kind == "Norm":
        return (f"quantized {config.kind}_norm",)
    return (f"quantized {re.sub('(?<!^)(?=[A-Z])', '_', kind.removeprefix('Quantized')).lower()}",)


def _plain(target: Any) -> str:
    """The word of an operator that is no kernel of backquant."""
    if target in _CLASSES:
        return _CLASSES[target]
    if target is torch.quantize_per_tensor:
        return "quantize"
    if target == "dequantize":
        return "dequantize"
    if str(target).startswith("quantized."):
        return _of_call(str(target).removeprefix("quantized."))
    if str(target).startswith("quantized_decomposed.convert_element_type"):
        return "to"
    known = find(target)
    return str(target) if known is None else known.name


def _of_call(name: str) -> str:
    for dynamic in ("_dynamic_fp16", "_dynamic"):
        if dynamic in name:
            return f"dynamic {name.replace(dynamic, '')}"
    if name.endswith("_fp16"):
        return f"dynamic {name.removesuffix('_fp16')}"
    return f"quantized {name}"


# size: the arguments of PyTorch's method
def same_words(
    case: Any,
    model: QuantizedModel | GraphModule,
    expected_node: Any = None,
    expected_node_occurrence: Any = None,
    expected_node_list: Any = None,
) -> None:
    """What ``QuantizationTestCase.checkGraphModuleNodes`` asks, of a lowered model."""
    words = words_of(model)
    if expected_node is not None:
        case.assertIn(_plain(expected_node.target), words)
    wanted: Counter[str] = Counter()
    for spec, times in (expected_node_occurrence or {}).items():
        wanted[_plain(spec.target)] += times
    found = Counter(words)
    modules = {
        _plain(spec.target)
        for spec in expected_node_occurrence or ()
        if isinstance(spec.target, type)
    }
    found.subtract(word for word in _of_modules(model) if word in wanted and word not in modules)
    for word, times in wanted.items():
        case.assertEqual(found[word], times, f"{word}: {found[word]} times in {words}, not {times}")
    rest = iter(words)
    for spec in expected_node_list or ():
        word = _plain(spec.target)
        case.assertTrue(any(word == other for other in rest), f"{word} not in order in {words}")
