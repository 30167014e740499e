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
from torch import Tensor
from torch.nn import functional as F

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

#: Grouped products, and their arguments.
FUNCTIONS = (torch._grouped_mm, F.grouped_mm)
NAMES = ("x", "matrix", "offs", "bias", "out_dtype")


def product_shape(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What a grouped product gives for tensors without values; ``None`` for any other call.

    PyTorch's own stand-in refuses all dtypes but bfloat16, which its kernels for CPUs do not.
    """
    if call not in FUNCTIONS:
        return None
    given = dict(zip(NAMES, args, strict=False)) | kwargs
    x, matrix, dtype = given["x"], given["matrix"], given.get("out_dtype")
    if x.dim() != 2 or matrix.dim() != 3:
        return None
    result: Tensor = x.new_empty((x.shape[0], matrix.shape[-1]), dtype=dtype)
    return result
