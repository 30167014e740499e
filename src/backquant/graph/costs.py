"""Multiply-adds per node, and which nodes give no tensor: measured by running the graph once.

Each operator that PyTorch dispatches while a node runs is counted to that node, also those inside of
modules that are one node (an attention layer, an untraced module) and of custom operators written in
Python. What cannot be counted is named: its count is unknown, not 0.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from backquant.graph.clone import own_buffers
from backquant.graph.example import call
from backquant.graph.grouped import columns, grouped_linear
from backquant.graph.interception import DispatchMode
from backquant.graph.shapes import run_noting

# How many multiply-adds each of PyTorch's operators does, from the shapes of its arguments.
#
# PyTorch's own formulas (``torch.utils.flop_counter``: matrix products, convolutions, attention) count two
# operations for each multiply-add. They know nothing of grouped matrix products, of matrix times vector, of
# bilinear layers, of distances (a matrix product where there are many rows), and of the fused operators that
# recurrent layers and attention run as on the CPU: here are those, and the commonest, for which PyTorch's
# take several times as long as a small product itself. What solves or decomposes matrices, and what
# multiplies sparse ones, has no such formula.

_aten = torch.ops.aten
Formula = Callable[..., int]


def _product(a: Any, b: Any, *_: Any, **__: Any) -> Any:
    return a.numel() * b.shape[-1]


def _added_product(_: Any, a: Any, b: Any, *__: Any, **___: Any) -> Any:
    return a.numel() * b.shape[-1]


def _linear(x: Any, weight: Any, *_: Any, **__: Any) -> Any:
    return x.numel() * weight.shape[0]


def _convolution(_: Any, weight: Any, *__: Any, out: Any, **___: Any) -> Any:
    """Not transposed: each output sums one weight of its output channel."""
    return out.numel() * math.prod(weight.shape[1:])


def _any_convolution(x: Any, weight: Any, *more: Any, out: Any, **_: Any) -> Any:
    """Transposed, each input is multiplied by one weight of its input channel."""
    is_transposed = more[4]
    return (x if is_transposed else out).numel() * math.prod(weight.shape[1:])


def _grouped(a: Any, b: Any, *_: Any, **__: Any) -> Any:
    """``_grouped_mm``: rows of one matrix by several matrices, or batches, or groups of columns."""
    rows = a.numel() if a.dim() == 3 and b.dim() == 3 else a.shape[-2] * a.shape[-1]
    return rows * b.shape[-1]


def _distances(a: Any, *_: Any, out: Any, **__: Any) -> Any:
    """``cdist``: a multiply-add for each value of each pair of rows; a [..., rows, width]."""
    return out.numel() * a.shape[-1]


def _trilinear(a: Any, b: Any, c: Any, *expand: Any, **_: Any) -> Any:
    """The product of three tensors, which are given dimensions of size 1 first."""
    sizes = []
    for tensor, dims in zip((a, b, c), expand, strict=False):
        shape = list(tensor.shape)
        for dim in dims:
            shape.insert(dim, 1)
        sizes.append(shape)
    return math.prod(max(each) for each in zip(*sizes, strict=True))


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
    """The two products of scaled dot-product attention."""
    *batch, length, width = q.shape
    return math.prod(batch) * length * k.shape[-2] * (width + v.shape[-1])


def _recurrent(x: Any, from_input: Any, from_hidden: Any, *_: Any, **__: Any) -> Any:
    """One layer in one direction: both weights for each step of each sequence; x is [..., in]."""
    return x.numel() // x.shape[-1] * (from_input.numel() + from_hidden.numel())


def _lengths(x: Any) -> list[int]:
    """The length of each sequence of a batch [batch, length, width], nested or not."""
    if x.is_nested:
        return [int(size[0]) for size in x._nested_tensor_size()]
    return [int(x.shape[1])] * int(x.shape[0])


def _multihead(query: Any, key: Any, _: Any, width: int, *__: Any, **___: Any) -> Any:
    """``_native_multi_head_attention``: four projections of ``width``, and the attention."""
    queries, keys = _lengths(query), _lengths(key)
    projected = 2 * sum(queries) + 2 * sum(keys)
    pairs = sum(q * k for q, k in zip(queries, keys, strict=True))
    return projected * width * width + 2 * pairs * width


def _encoder_layer(x: Any, width: int, *args: Any, **_: Any) -> Any:
    """``_transformer_encoder_layer_fwd``: attention, and the two linear layers behind it."""
    weights = [a for a in args if isinstance(a, torch.Tensor) and a.dim() == 2]
    first, second = weights[2:4]  # after the two weights of the attention projections
    linears = sum(_lengths(x)) * (first.numel() + second.numel())
    return _multihead(x, x, x, width) + linears


def _two_for_each(count: Callable[..., int]) -> Formula:
    """A formula of PyTorch's, which takes shapes (or, if it is raw, the tensors) and counts twice."""
    return lambda *args, out, **kwargs: int(count(*args, **kwargs, out_val=out)) // 2


_OWN: Mapping[Any, Formula] = {
    **dict.fromkeys((_aten.mv, _aten.dot, _aten.vdot), lambda a, *_, **__: a.numel()),
    _aten.addmv: lambda _, a, *__, **___: a.numel(),
    **dict.fromkeys((_aten.mm, _aten.bmm, _aten._int_mm), _product),
    **dict.fromkeys((_aten.addmm, _aten.baddbmm, _aten.addbmm), _added_product),
    _aten._addmm_activation: _added_product,
    **dict.fromkeys((_aten.linear, _aten.mkldnn_linear), _linear),
    _aten.convolution: _any_convolution,
    _aten.mkldnn_convolution: _convolution,
    # inputs [time, batch, in], a weight [kernel, in, out]
    _aten.conv_tbc: lambda _, weight, *__, out, **___: math.prod(out.shape[:2]) * weight.numel(),
    _aten._grouped_mm: _grouped,
    # each row by the matrix of its group
    grouped_linear.overloadpacket: lambda x, w, ends, **_: x.numel() * columns(w, ends),
    _aten._trilinear: _trilinear,
    **dict.fromkeys((_aten._euclidean_dist, _aten._cdist_forward), _distances),
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_fused_attention_overrideable: _attention,
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten._native_multi_head_attention: _multihead,
    _aten._transformer_encoder_layer_fwd: _encoder_layer,
}

#: Multiply-adds by operator (its packet): called with the operator's arguments and its result ``out``.
FORMULAS: Mapping[Any, Formula] = {
    **{
        operator: _two_for_each(count)
        for operator, count in flop_registry.items()
        if isinstance(operator, torch._ops.OpOverloadPacket) and "backward" not in str(operator)
    },
    **_OWN,
}
_BEGINNINGS = (
    *("linalg_", "_linalg_", "fbgemm_", "quantized_", "_weight_int", "_dyn_quant_matmul"),
    *("_sparse_", "_cslt_", "cholesky", "lu_", "_lu_", "slow_conv", "_slow_conv"),
)
_NAMES = frozenset(
    {
        *("_mixed_dtypes_linear", "_scaled_grouped_mm", "_spsolve", "hspmm", "smm", "sspaddmm"),
        *("_triton_multi_head_attention", "triangular_solve"),
    }
)
_FREE = frozenset({"linalg_vector_norm", "linalg_cross", "linalg_diagonal", "_linalg_check_errors"})


def has_no_formula(operator: Any) -> bool:
    """Whether an operator of PyTorch multiplies matrices in a way that has no formula here.

    >>> has_no_formula(torch.ops.aten.linalg_inv_ex), has_no_formula(torch.ops.aten.relu)
    (True, False)
    """
    name = operator._qualified_op_name.partition("::")[2]
    return name not in _FREE and (name in _NAMES or name.startswith(_BEGINNINGS))


_CALLS = ("call_module", "call_function", "call_method")
_PYTORCH = frozenset({"aten", "prims", "prim"})

# namespaces of quantize and dequantize operators, which do no multiply-adds
_FREE_NAMESPACES = frozenset({"quantized_decomposed", "backquant"})

# types of values that are no tensors and contain none
_SCALARS = (
    *(bool, int, float, complex, str, type(None), type(...), type, slice, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(torch.SymInt, torch.SymFloat, torch.SymBool),
)


@dataclass(frozen=True)
class GraphCosts:
    """What one run of a graph has shown of its nodes, by name.

    ``multiply_adds``: those of each node that has any. ``uncounted``: the operators in a node whose
    multiply-adds are not known. ``bookkeeping``: the nodes whose value is no tensor and holds none (sizes,
    dtypes, comparisons of such, assertions), and those that take a tuple or another container apart.
    ``total``: multiply-adds of the model that the graph was captured from, 0 if it was not run.
    ``not_counted``: why the graph was not run, else empty.
    """

    multiply_adds: Mapping[str, int] = field(default_factory=dict)
    uncounted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bookkeeping: frozenset[str] = frozenset()
    total: int = 0
    not_counted: str = ""


class MultiplyAdds(DispatchMode):
    """Counts while it is active: ``count``, and in ``unknown`` the operators that it cannot count.

    >>> with MultiplyAdds() as counter:
    ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> counter.count, counter.unknown
    (24, [])
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.unknown: list[str] = []
        self._seen = 0

    def take(self) -> tuple[int, tuple[str, ...]]:
        """What was counted since it was last asked."""
        found = self.count, tuple(dict.fromkeys(self.unknown))
        self.count, self.unknown = 0, []
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        self._seen += _computes(func)
        if not isinstance(func, torch._ops.OpOverload):
            return self._higher_order(func, args, kwargs)
        formula = FORMULAS.get(func.overloadpacket)
        if formula is not None:
            return self._counted(func, formula, args, kwargs)
        if func.namespace in _FREE_NAMESPACES:
            return func(*args, **kwargs)
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if func.namespace not in _PYTORCH:
            return self._inside(func, args, kwargs)
        if has_no_formula(func.overloadpacket):
            self.unknown.append(str(func.overloadpacket))
        return func(*args, **kwargs)

    def _counted(self, func: Any, formula: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        named = {**kwargs, "out": out}
        try:
            self.count += int(formula(*args, **named))
        except Exception:  # shapes that the formula does not handle, for example of nested tensors
            self.unknown.append(str(func.overloadpacket))
        return out

    def _inside(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A custom operator: counted by what its own kernel calls, if that can be seen."""
        if not any(_holds_floats(value) for value in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        before, cpu = self._seen, torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
        name = func.name()
        has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU")
        if not has_kernel or not _all_on_cpu((args, kwargs)):
            out = func(*args, **kwargs)
        else:
            with self:
                out = func.redispatch(cpu, *args, **kwargs)
        if self._seen == before and any(_holds_floats(value) for value in tree_leaves(out)):
            self.unknown.append(str(func.overloadpacket))
        return out

    def _higher_order(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if func is torch.ops.higher_order.cond:
            predicate, if_true, if_false, operands = args
            with self:
                return (if_true if predicate else if_false)(*operands)
        self.unknown.append(str(func))
        return func(*args, **kwargs)


def _computes(func: Any) -> bool:
    """Whether an operator does more than look at a tensor or make room for one."""
    is_operator = isinstance(func, torch._ops.OpOverload)
    return not is_operator or not (func.is_view or "empty" in func._schema.name)


def _holds_floats(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _all_on_cpu(values: Any) -> bool:
    tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
    return all(tensor.device.type == "cpu" for tensor in tensors)


def graph_costs(module: GraphModule, example_inputs: Any) -> GraphCosts:
    """What a run of ``module`` on example inputs shows of its nodes.

    Args:
        module: a float graph in eval mode; it is run once without gradients.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments.

    >>> from torch.fx import symbolic_trace
    >>> gm = symbolic_trace(lambda x: (x @ x).reshape(x.size(0) * 2))
    >>> costs = graph_costs(gm, (torch.zeros(2, 2),))
    >>> costs.multiply_adds, sorted(costs.bookkeeping)
    ({'matmul': 8}, ['mul', 'size'])
    """
    return costs_and_outputs(module, example_inputs)[0]


def costs_and_outputs(module: GraphModule, example_inputs: Any) -> tuple[GraphCosts, Any]:
    """``graph_costs``, and what the graph returned in that run.

    >>> from torch.fx import symbolic_trace
    >>> costs_and_outputs(symbolic_trace(lambda x: x + 1), (torch.zeros(2),))[1]
    tensor([1., 1.])
    """
    counter, tensors = MultiplyAdds(), set[Any]()
    counts, uncounted, bookkeeping = dict[str, int](), dict[str, tuple[str, ...]](), set[str]()

    def note(node: Node, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensors.add(node)
        if node.op not in _CALLS:
            return
        count, unknown = counter.take()
        if count:
            counts[node.name] = count
        if unknown:
            uncounted[node.name] = unknown
        source = node.args[0] if node.target is operator.getitem else None
        is_part_of_tuple = isinstance(source, Node) and source not in tensors
        if is_part_of_tuple or all(isinstance(leaf, _SCALARS) for leaf in tree_leaves(value)):
            bookkeeping.add(node.name)

    with counter:
        outputs = run_noting(module, example_inputs, note)
    return GraphCosts(counts, uncounted, frozenset(bookkeeping)), outputs


def total_of(model: nn.Module, example_inputs: Any) -> int:
    """Multiply-adds of one call of any model; what cannot be counted is left out.

    >>> total_of(nn.LSTM(4, 6).eval(), torch.zeros(5, 3, 4))
    3600
    """
    trial, counter = own_buffers(model), MultiplyAdds()
    with counter:
        call(trial, example_inputs)
    return counter.count
