"""Linear layers of groups of rows: the experts of a mixture (``backquant.graph.grouped``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from backquant.backend_config import BackendPatternConfig, DTypeConfig
from backquant.graph import GraphRewriter
from backquant.graph.grouped import FUNCTIONS, NAMES, grouped_linear
from backquant.graph.rewrite import arguments_by_name
from backquant.operators.entry import admit, functional
from backquant.operators.operator import INPUT, Operator, Sample, Weight


def entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """``grouped_linear(input, weight, offsets)``.

    >>> entries([DTypeConfig()])[0]._input_type_to_index
    {'weight': 1}
    """
    return admit([functional(grouped_linear, weight=1)], dtype_configs)


def _every_group(input: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Every row by the matrices of all groups, of which one result is taken: no runtime has the loop."""
    rows, groups = input.shape[0], offsets.shape[0]
    made = F.linear(input, weight).reshape(rows, groups, weight.shape[0] // groups)
    group = (torch.arange(rows).unsqueeze(1) >= offsets).sum(1)
    place = group.clamp(max=groups - 1).reshape(rows, 1, 1).expand(rows, 1, made.shape[2])
    taken = made.gather(1, place).squeeze(1)
    return torch.where((group < groups).unsqueeze(1), taken, 0.0)


OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="grouped_linear",
        family="linear",
        sample=Sample(((5, 8),), call=(INPUT, Weight((12, 8)), torch.tensor((2, 2, 5)))),
        functions=(grouped_linear,),
        weight_index=1,
        weight_channel_axis=0,
        places=(2,),
        portable={grouped_linear: _every_group},
    ),
)


#: Grouped products by name; the last is what ``transformers`` calls when it is exported.
_PRODUCTS = frozenset(
    {"aten._grouped_mm.default", "aten._grouped_mm", "transformers.grouped_mm_fallback.default"}
)


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
    if node.target not in FUNCTIONS and str(node.target) not in _PRODUCTS:
        return None
    given = arguments_by_name(node, *NAMES)
    x, matrix, offsets = (cast(fx.Node, given.get(name)) for name in ("x", "matrix", "offs"))
    if given.get("bias") is not None or given.get("out_dtype") is not None:
        return None
    is_read = all(isinstance(each, fx.Node) for each in (x, matrix, offsets))
    return (x, matrix, offsets) if is_read else None
