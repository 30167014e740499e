"""Convolutions along a column of one pixel, written along a line.

Networks on sounds and series slide kernels of ``[taps, 1]`` over images ``[n, channels, length, 1]``.
Runtimes have fast kernels for lines, ``[1, taps]``, and take several times as long for columns (torchcrepe's
first three convolutions: ONNX Runtime 15 ms in place of 4, OpenVINO and Inductor 40 in place of 4). With both
axes of image, kernel and result swapped it is the same sum. Where the width is 1 that moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from backquant.graph import get_module
from backquant.graph.clone import with_own_state
from backquant.lower.qdq import is_dequantize, is_quantize
from backquant.nn.quantized.reference import Conv2d

_SIZES = ("kernel_size", "stride", "padding", "dilation")
_WEIGHTS = ("weight", "weight_float")
#: Between a convolution and the quantize node behind it.
_SINGLE = (
    nn.ReLU,
    nn.ReLU6,
    nn.Hardtanh,
    nn.Hardswish,
    nn.SiLU,
    nn.GELU,
    nn.Sigmoid,
    nn.Tanh,
    nn.LeakyReLU,
)


def lay_columns(
    module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], rule: str = "lines"
) -> None:
    """Write those integer convolutions of ``module`` so whose images are one pixel wide, in place, in its
    modules, too. Names of nodes are kept.

    Args:
        module: a reference graph whose modules nobody else has; it is run once if there are such kernels.
        args: inputs of it.
        kwargs: the same, by keyword.
        rule: ``QDQRules.columns``: what is transposed are dequantized values, or integers.

    >>> graph = fx.symbolic_trace(nn.Sequential(nn.Conv2d(1, 1, (3, 1))))
    >>> lay_columns(graph, (torch.ones(1, 1, 3, 1),), {})  # no integers
    >>> [node.op for node in graph.graph.nodes]
    ['placeholder', 'call_module', 'output']
    """
    columns = {
        path: nodes
        for path, nodes in _called(module)
        if all(node.args for node in nodes) and _is_column(get_module(module, path))
    }
    narrow = _narrow(module, columns, args, kwargs) if columns else set()
    for path in narrow:
        _turn(_convolution(get_module(module, path)))
        for node in columns[path]:
            _lay(node, module, rule)
    if narrow:
        module.recompile()


def _called(module: fx.GraphModule) -> Iterator[tuple[str, list[fx.Node]]]:
    calls: dict[str, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    yield from calls.items()


def _convolution(part: nn.Module) -> Any:
    return part[0] if isinstance(part, nn.Sequential) and len(part) else part


def _is_column(part: nn.Module) -> bool:
    own = _convolution(part)
    if type(own) is not Conv2d or own.weight.is_floating_point() or own.weight_scale.dim() > 1:
        return False
    padding: Any = own.padding
    plain = own.padding_mode == "zeros" and not isinstance(padding, str) and not padding[-1]
    return bool(plain and own.kernel_size[0] > 1 and own.kernel_size[1] == 1)


def _narrow(
    module: fx.GraphModule, paths: Iterable[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> set[str]:
    """Those of ``paths`` whose images are one pixel wide at each call."""
    widths: dict[str, set[int]] = {path: set() for path in paths}

    def seen(own: set[int], _: nn.Module, given: tuple[Any, ...]) -> None:
        own.add(given[0].shape[-1] if given[0].dim() == 4 else 0)

    with ExitStack() as hooks, torch.no_grad(), with_own_state(module):
        for path, own in widths.items():
            hook = get_module(module, path).register_forward_pre_hook(partial(seen, own))
            hooks.callback(hook.remove)
        module(*args, **kwargs)
    return {path for path, own in widths.items() if own == {1}}


def _turn(own: Any) -> None:
    for name in _SIZES:
        setattr(own, name, tuple(getattr(own, name))[::-1])
    own._reversed_padding_repeated_twice = [n for n in reversed(own.padding) for _ in range(2)]
    for name in _WEIGHTS:
        if name in own._buffers:
            own._buffers[name] = own._buffers[name].transpose(2, 3).contiguous()


def _lay(node: fx.Node, module: fx.GraphModule, rule: str) -> None:
    read: Any = node.args[0]
    graph = node.graph
    integers = rule == "integer_lines" and is_dequantize(read)
    with graph.inserting_before(node):
        turned = graph.call_function(torch.transpose, (read.args[0] if integers else read, 2, 3))
        if integers:
            turned = graph.call_function(read.target, (turned, *read.args[1:]), dict(read.kwargs))
            turned.meta = dict(read.meta)
    node.replace_input_with(read, turned)
    if not read.users:
        graph.erase_node(read)
    last = _end(node, module)
    after = [last]
    if is_quantize(last) and rule == "lines":
        after = [user for user in last.users if is_dequantize(user)]
    for each in after:
        with graph.inserting_after(each):
            back = graph.call_function(torch.transpose, (each, 2, 3))
        each.replace_all_uses_with(back, delete_user_cb=partial(_is_other, back))


def _is_other(one: fx.Node, user: fx.Node) -> bool:
    return user is not one


def _end(node: fx.Node, module: fx.GraphModule) -> fx.Node:
    """The quantize node behind ``node``, where only that reads it, or an activation between them."""
    last = node
    while len(last.users) == 1:
        [user] = last.users
        if is_quantize(user):
            return user
        if user.op != "call_module" or not isinstance(
            get_module(module, str(user.target)), _SINGLE
        ):
            break
        last = user
    return node
