"""Products of sorted rows with one matrix for each group of them, as mixtures of experts have it.

    out[offsets[g - 1] : offsets[g]] = input[offsets[g - 1] : offsets[g]] @ weight[g].T

``torch.nn.functional.grouped_mm`` takes the matrices as one tensor ``[groups, in, out]``, whose channels lie
along two axes. ``torch.ops.backquant.grouped_linear`` takes them one below the other, ``[groups * out, in]``,
so that a scale for each output of each group is a scale for each row, as of a linear layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from backquant.graph.rewrite import GraphRewriter, arguments_by_name

_LIBRARY = torch.library.Library("backquant", "FRAGMENT")
_LIBRARY.define("grouped_linear(Tensor input, Tensor weight, Tensor offsets) -> Tensor")


def spans(offsets: Tensor, rows: int) -> Iterator[tuple[int, int, int]]:
    """Number, first row and end of each group that has rows, of ``rows`` altogether.

    >>> list(spans(torch.tensor([2, 2, 5]), 4))
    [(0, 0, 2), (2, 2, 4)]
    """
    begin = 0
    for group, last in enumerate(offsets.tolist()):
        end = min(int(last), rows)
        if end > begin:
            yield group, begin, end
            begin = end


def columns(weight: Tensor, offsets: Tensor) -> int:
    """The outputs of one group. Raises ``ValueError`` where the rows of ``weight`` are no such groups.

    >>> columns(torch.ones(6, 2), torch.tensor([1, 4]))
    3
    """
    groups = offsets.shape[0] if offsets.dim() == 1 else 0
    if not groups or weight.shape[0] % groups:
        raise ValueError(f"weight {list(weight.shape)} is not of {groups} groups")
    return int(weight.shape[0] // groups)


def _grouped_linear(input: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    width = columns(weight, offsets)
    out = input.new_zeros((input.shape[0], width))
    for group, begin, end in spans(offsets, input.shape[0]):
        out[begin:end] = F.linear(input[begin:end], weight[group * width : (group + 1) * width])
    return out


def _shape(input: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return input.new_empty((input.shape[0], columns(weight, offsets)))


def _saved(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, given: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, offsets = ctx.saved_tensors
    of_x = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
    of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
    width = columns(weight, offsets)
    for group, begin, end in spans(offsets, x.shape[0]):
        rows = slice(group * width, (group + 1) * width)
        if of_x is not None:
            of_x[begin:end] = given[begin:end] @ weight[rows]
        if of_weight is not None:
            of_weight[rows] = given[begin:end].T @ x[begin:end]
    return of_x, of_weight, None


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("grouped_linear", _grouped_linear, _device)
torch.library.register_fake("backquant::grouped_linear", _shape, lib=_LIBRARY)
torch.library.register_autograd(
    "backquant::grouped_linear", _gradients, setup_context=_saved, lib=_LIBRARY
)
grouped_linear = torch.ops.backquant.grouped_linear.default

#: Grouped products; the last is what ``transformers`` calls when it is exported.
_PRODUCTS = frozenset(
    {"aten._grouped_mm.default", "aten._grouped_mm", "transformers.grouped_mm_fallback.default"}
)
_FUNCTIONS = (torch._grouped_mm, F.grouped_mm)
_NAMES = ("x", "matrix", "offs", "bias", "out_dtype")


def product_shape(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What a grouped product gives for tensors without values; ``None`` for any other call.

    PyTorch's own stand-in refuses all dtypes but bfloat16, which its kernels for CPUs do not.
    """
    if call not in _FUNCTIONS:
        return None
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    x, matrix, dtype = given["x"], given["matrix"], given.get("out_dtype")
    if x.dim() != 2 or matrix.dim() != 3:
        return None
    result: Tensor = x.new_empty((x.shape[0], matrix.shape[-1]), dtype=dtype)
    return result


def grouped_product(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """A grouped product with constant matrices as ``grouped_linear``. Rows behind the last group are 0, as in
    the reference; ``grouped_mm`` leaves them as they are in memory.

    >>> class Experts(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__(); self.w = torch.ones(2, 4, 3)
    ...     def forward(self, x, ends):
    ...         return torch.nn.functional.grouped_mm(x, self.w, offs=ends)
    >>> module = fx.symbolic_trace(Experts())
    >>> GraphRewriter(module).apply(grouped_product), [node.name for node in module.graph.nodes]
    (1, ['x', 'ends', 'w_grouped_0', 'grouped_linear_default', 'output'])
    >>> module(torch.ones(5, 4), torch.tensor([1, 5], dtype=torch.int32)).shape
    torch.Size([5, 3])
    """
    read = _operands(node)
    value = None if read is None else write.constants.value(read[1])
    if read is None or value is None or not _are_matrices(value):
        return None
    x, matrix, offsets = read
    path = write.memo.get(matrix.target)
    if path is None:
        rows = value.detach().transpose(1, 2).reshape(-1, value.shape[1]).contiguous()
        weight = write.buffer(node, f"{matrix.target}_grouped_", rows)
        write.memo[matrix.target] = str(weight.target)
    else:
        weight = write.read(node, path)
    return write.call(node, grouped_linear, x, weight, offsets)


def grouped_product_to_train(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """The same for training: the rows are computed from the parameter at each call.

    >>> class Experts(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__(); self.w = torch.nn.Parameter(torch.ones(2, 3, 4))
    ...     def forward(self, x, ends):
    ...         return torch.nn.functional.grouped_mm(x, self.w.transpose(-2, -1), offs=ends)
    >>> module = fx.symbolic_trace(Experts())
    >>> GraphRewriter(module).apply(grouped_product_to_train), [node.name for node in module.graph.nodes]
    (1, ['x', 'ends', 'w', 'flatten', 'grouped_linear_default', 'output'])
    """
    read = _operands(node)
    if read is None:
        return None
    x, matrix, offsets = read
    stored = _turned(matrix)
    value = write.constants.value(matrix if stored is None else stored)
    if value is None or not _are_matrices(value):
        return None
    # by names that no entry is for: the weight is rounded as rows, and once
    rows = write.call(node, "swapaxes", matrix, 1, 2) if stored is None else stored
    made = write.call(node, grouped_linear, x, write.call(node, "flatten", rows, 0, 1), offsets)
    write.replace(node, made)
    if stored is not None and not matrix.users:
        write.erase(matrix)
    return made


def _turned(node: fx.Node) -> fx.Node | None:
    """What ``node`` turns, if it turns the last two axes of a stored tensor of three."""
    if node.target not in ("transpose", torch.transpose):
        return None
    source, *axes = node.args
    is_last = set(axes) in ({1, 2}, {-1, -2}, {1, -1}, {-2, 2}) and len(axes) == 2
    return source if is_last and isinstance(source, fx.Node) and source.op == "get_attr" else None


def _are_matrices(value: Tensor) -> bool:
    return value.dim() == 3 and value.dtype == torch.float32


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Rows, matrices and the ends of groups of a grouped product."""
    if node.op != "call_function":
        return None
    if node.target not in _FUNCTIONS and str(node.target) not in _PRODUCTS:
        return None
    given = arguments_by_name(node, *_NAMES)
    operands = [given.get(name) for name in ("x", "matrix", "offs")]
    if given.get("bias") is not None or given.get("out_dtype") is not None:
        return None
    is_read = all(isinstance(each, fx.Node) for each in operands)
    return tuple(operands) if is_read else None  # type: ignore[return-value]
