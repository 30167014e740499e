"""Operators that XNNPACK takes in one spelling only, in that spelling. Values stay what they were.

Source: ExecuTorch 1.5, ``backends/xnnpack/partition/config/generic_node_configs.py``.

1. ``mean`` over the two inner axes only with ``keepdim=True``: the axes are dropped behind it, behind a
   second pair of quantize and dequantize nodes when the result is quantized.
2. ``squeeze`` and ``unsqueeze`` become ``view``.
3. A ``view`` (also of ``flatten`` and ``reshape``) with one symbolic size has -1 there.
4. ``softmax`` over the last axis of a tensor of four dimensions runs on three. Behind a convolution
   XNNPACK's tensors lie channels last, and its softmax then runs over the channels: in ExecuTorch 1.5
   a silently wrong result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram

from backquant.lower.qdq import is_quantize

__all__ = ["rewrite"]

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten.flatten.using_ints)
_SQUEEZES = (
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.unsqueeze.default,
)
_SOFTMAXES = (_aten.softmax.int, _aten._softmax.default)


def rewrite(program: ExportedProgram) -> None:
    """Apply the rules in place, in graph order."""
    for node in list(program.graph.nodes):
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        if rule is not None:
            rule(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _mean(node: Any) -> None:
    source, axes, *more = node.args
    keep = bool(more[0]) if more else bool(node.kwargs.get("keepdim", False))
    rank = source.meta["val"].dim()
    if keep or rank != 4 or not axes or sorted(axis % rank for axis in axes) != [2, 3]:
        return
    kept = _before(node, node.target, (source, axes, True))
    value = kept
    users = list(node.users)
    if len(users) == 1 and is_quantize(users[0]):
        qparams = users[0].args[1:]
        dequantize = torch.ops.quantized_decomposed.dequantize_per_tensor.default
        quantized = _before(node, users[0].target, (kept, *qparams))
        value = _before(node, dequantize, (quantized, *qparams))
    _replace(node, _before(node, _aten.view.default, (value, _sizes(node))))


def _squeeze(node: Any) -> None:
    _replace(node, _before(node, _aten.view.default, (node.args[0], _sizes(node))))


def _view(node: Any) -> None:
    sizes = _sizes(node)
    symbolic = any(not isinstance(size, int) for size in node.meta["val"].shape)
    if node.target is not _aten.view.default or symbolic:
        _replace(node, _before(node, _aten.view.default, (node.args[0], sizes)))


def _softmax(node: Any) -> None:
    source, axis, *more = node.args
    shape = source.meta["val"].shape
    if len(shape) != 4 or axis not in (-1, 3) or not _follows_convolution(source):
        return
    # all but the first axis, which may be symbolic, and the last one become one
    flat = _before(node, _aten.flatten.using_ints, (source, 1, 2))
    flat = _before(node, _aten.view.default, (source, _sizes(flat)))
    inner = _before(node, node.target, (flat, -1, *more))
    _replace(node, _before(node, _aten.view.default, (inner, _sizes(node))))


_LAYOUT_GIVERS = (
    _aten.conv2d.default,
    _aten.convolution.default,
    _aten.conv_transpose2d.input,
    _aten.max_pool2d.default,
    _aten.avg_pool2d.default,
    _aten.adaptive_avg_pool2d.default,
)
_LAYOUT_TAKERS = (*_VIEWS, *_SQUEEZES, _aten.permute.default, _aten.linear.default)


def _follows_convolution(node: Any) -> bool:
    """Whether a value that XNNPACK keeps channels last reaches ``node`` in that layout."""
    seen: set[Any] = set()
    stack = [node]
    while stack:
        node = stack.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if node.target in _LAYOUT_GIVERS:
            return True
        if node.target not in _LAYOUT_TAKERS:
            stack += node.all_input_nodes
    return False


def _sizes(node: Any) -> list[Any]:
    """The shape of ``node``; one symbolic size is -1."""
    shape = list(node.meta["val"].shape)
    symbolic = [i for i, size in enumerate(shape) if not isinstance(size, int)]
    if len(symbolic) == 1:
        shape[symbolic[0]] = -1
    return shape


def _before(node: Any, target: Any, args: tuple[Any, ...]) -> Any:
    """A call before ``node`` that stands for the same operator of the model, with its value's meta."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args)
    made.meta = dict(node.meta)
    values = torch.utils._pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], args)
    mode = detect_fake_mode(values)
    assert mode is not None
    with mode:
        made.meta["val"] = target(*values)
    return made


def _replace(node: Any, by: Any) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


_RULES: dict[Any, Callable[[Any], None]] = {
    _aten.mean.dim: _mean,
    **dict.fromkeys(_SQUEEZES, _squeeze),
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(_SOFTMAXES, _softmax),
}
