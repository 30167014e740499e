"""Products of sorted rows with one matrix for each group of them, as mixtures of experts have it.

    out[offsets[g - 1] : offsets[g]] = input[offsets[g - 1] : offsets[g]] @ weight[g].T

``torch.nn.functional.grouped_mm`` takes the matrices as one tensor ``[groups, in, out]``, whose channels lie
along two axes. ``torch.ops.backquant.grouped_linear`` takes them one below the other, ``[groups * out, in]``,
so that a scale for each output of each group is a scale for each row, as of a linear layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from backquant.graph.constant_products import Constants
from backquant.graph.edit import NamePool
from backquant.graph.scope import Scope

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


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("grouped_linear", _grouped_linear, _device)
torch.library.register_fake("backquant::grouped_linear", _shape, lib=_LIBRARY)
grouped_linear = torch.ops.backquant.grouped_linear.default

#: Grouped products; the last is what ``transformers`` calls when it is exported.
_PRODUCTS = frozenset(
    {"aten._grouped_mm.default", "aten._grouped_mm", "transformers.grouped_mm_fallback.default"}
)
_FUNCTIONS = (torch._grouped_mm, F.grouped_mm)


def grouped_linears(
    module: fx.GraphModule, scopes: dict[str, Scope], kept: Collection[Any] = ()
) -> int:
    """Write grouped products with constant matrices as ``grouped_linear``, in place; how many.

    Operators in ``kept`` stay. Rows behind the last group are 0, as in the reference; ``grouped_mm`` leaves
    them as they are in memory.

    >>> class Experts(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__(); self.w = torch.ones(2, 4, 3)
    ...     def forward(self, x, ends):
    ...         return torch.nn.functional.grouped_mm(x, self.w, offs=ends)
    >>> module = fx.symbolic_trace(Experts())
    >>> grouped_linears(module, {}), [node.name for node in module.graph.nodes]
    (1, ['x', 'ends', 'w_grouped_0', 'grouped_linear_default', 'output'])
    >>> module(torch.ones(5, 4), torch.tensor([1, 5], dtype=torch.int32)).shape
    torch.Size([5, 3])
    """
    constants, names = Constants(module), NamePool(module)
    found = [
        (node, *read)
        for node in module.graph.nodes
        if node.target not in kept and (read := _read(node, constants)) is not None
    ]
    stored: dict[str, str] = {}
    for node, x, matrix, offsets in found:
        name = str(matrix.target)
        if name not in stored:
            value = constants.value(matrix)
            assert value is not None
            stored[name] = names.take(f"{name}_grouped_")
            rows = value.detach().transpose(1, 2).reshape(-1, value.shape[1]).contiguous()
            module.register_buffer(stored[name], rows)
        with module.graph.inserting_before(node):
            weight = module.graph.get_attr(stored[name])
            made = module.graph.call_function(grouped_linear, (x, weight, offsets))
        made.meta.update(node.meta)
        for new in (weight, made):
            scopes[new.name] = scopes.get(node.name, Scope("", None))
        node.replace_all_uses_with(made)
        for old in (node, matrix):
            if not old.users:
                module.graph.erase_node(old)
                scopes.pop(old.name, None)
    if found:
        module.recompile()
    return len(found)


def _read(node: fx.Node, constants: Constants) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Rows, matrices and the ends of groups, where the matrices are float32 constants."""
    if node.op != "call_function":
        return None
    if node.target not in _FUNCTIONS and str(node.target) not in _PRODUCTS:
        return None
    given = dict(zip(("x", "matrix", "offs", "bias", "out_dtype"), node.args, strict=False))
    given |= node.kwargs
    x, matrix, offsets = given.get("x"), given.get("matrix"), given.get("offs")
    if given.get("bias") is not None or given.get("out_dtype") is not None:
        return None
    value = constants.value(matrix)
    if value is None or value.dim() != 3 or value.dtype != torch.float32:
        return None
    is_read = all(isinstance(each, fx.Node) for each in (x, offsets))
    return (x, matrix, offsets) if is_read else None  # type: ignore[return-value]
