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
from backquant.graph.provenance import Scope

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
        _put_in(module, scopes, (weight, made), (node, matrix))
    if found:
        module.recompile()
    return len(found)


def _put_in(
    module: fx.GraphModule,
    scopes: dict[str, Scope],
    new: tuple[fx.Node, ...],
    old: tuple[fx.Node, fx.Node],
) -> None:
    """Let the last of ``new`` stand for the first of ``old``; of these, what nobody reads goes."""
    old[0].replace_all_uses_with(new[-1])
    new[-1].meta.update(old[0].meta)
    for node in new:
        scopes.setdefault(node.name, scopes.get(old[0].name, Scope("", None)))
    for node in old:
        if not node.users:
            module.graph.erase_node(node)
            scopes.pop(node.name, None)


def grouped_linears_to_train(module: fx.GraphModule, scopes: dict[str, Scope]) -> int:
    """The same for training: the rows are computed from the parameter at each call; how many.

    >>> class Experts(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__(); self.w = torch.nn.Parameter(torch.ones(2, 3, 4))
    ...     def forward(self, x, ends):
    ...         return torch.nn.functional.grouped_mm(x, self.w.transpose(-2, -1), offs=ends)
    >>> module = fx.symbolic_trace(Experts())
    >>> grouped_linears_to_train(module, {}), [node.name for node in module.graph.nodes]
    (1, ['x', 'ends', 'w', 'flatten', 'grouped_linear_default', 'output'])
    """
    constants = Constants(module)
    found = [
        (node, *read)
        for node in module.graph.nodes
        if (read := _read(node, constants, turned=True)) is not None
    ]
    for node, x, matrix, offsets in found:
        with module.graph.inserting_before(node):
            turned = matrix.all_input_nodes[0] if matrix.op != "get_attr" else None
            # by names that no entry is for: the weight is rounded as rows, and once
            rows = turned or module.graph.call_method("swapaxes", (matrix, 1, 2))
            weight = module.graph.call_method("flatten", (rows, 0, 1))
            made = module.graph.call_function(grouped_linear, (x, weight, offsets))
        _put_in(module, scopes, (rows, weight, made), (node, matrix))
    if found:
        module.recompile()
    return len(found)


def _turned(node: Any, constants: Constants) -> fx.Node | None:
    """What ``node`` turns: the last two axes of a constant."""
    if not isinstance(node, fx.Node) or node.target not in ("transpose", torch.transpose):
        return None
    source, *axes = node.args
    value = constants.value(source)
    is_last = set(axes) in ({1, 2}, {-1, -2}, {1, -1}, {-2, 2}) and len(axes) == 2
    return source if value is not None and is_last and isinstance(source, fx.Node) else None


def _read(
    node: fx.Node, constants: Constants, turned: bool = False
) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Rows, matrices and the ends of groups, where the matrices are float32 constants, or ``turned`` ones."""
    if node.op != "call_function":
        return None
    if node.target not in _FUNCTIONS and str(node.target) not in _PRODUCTS:
        return None
    given = dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
    x, matrix, offsets = given.get("x"), given.get("matrix"), given.get("offs")
    if given.get("bias") is not None or given.get("out_dtype") is not None:
        return None
    value = constants.value((_turned(matrix, constants) if turned else None) or matrix)
    if value is None or value.dim() != 3 or value.dtype != torch.float32:
        return None
    is_read = all(isinstance(each, fx.Node) for each in (x, offsets))
    return (x, matrix, offsets) if is_read else None  # type: ignore[return-value]
