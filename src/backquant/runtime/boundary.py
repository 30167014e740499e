"""What crosses the boundary of a quantized model: arguments that are checked and made integers, results that
share no memory with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx import Graph
from torch.utils._pytree import tree_leaves, tree_map_only

from backquant.dtypes import QParams
from backquant.errors import InputError
from backquant.graph import get_module
from backquant.graph.example import describe_value
from backquant.graph.in_place import changes_argument, is_view
from backquant.graph.queries import inputs_behind
from backquant.lower.kernels.boundary import quantize
from backquant.lower.kernels.linear_dynamic import DynamicLinear
from backquant.lower.kernels.recurrent import QuantizedCell, QuantizedRecurrent
from backquant.operators import moves_values

# Quantized tensors at the inputs and outputs of a model, as plain integers.


def as_integers(value: Any, qparams: QParams, name: str = "") -> Any:
    """Floats, or a quantized tensor, as plain integers under ``qparams``; those, and what is no tensor, as
    they are. Raises ``InputError`` for integers of another dtype, and for floats that are not finite.

    >>> tensor = torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.5, 3, torch.quint8)
    >>> as_integers(tensor, QParams(0.5, 3, 0, 255, torch.uint8))
    tensor([5, 7], dtype=torch.uint8)
    >>> as_integers(tensor.dequantize(), QParams(1.0, 0, 0, 255, torch.uint8))
    tensor([1, 2], dtype=torch.uint8)
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_quantized:
        if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            same = (value.q_scale(), value.q_zero_point()) == qparams.args
            if same and value.int_repr().dtype == qparams.dtype and qparams.is_full_range:
                return value.int_repr()
        value = value.dequantize()
    if not value.is_floating_point():
        if value.dtype != qparams.dtype:
            raise _of_other_dtype(value, qparams, name)
        return value
    if not (value.is_meta or bool(value.isfinite().all())):
        raise InputError(
            f"input {name!r} holds NaN or infinite values, and arrives as integers",
            where=f"{name}: {describe_value(value)}",
            fix=f"model(torch.nan_to_num({name}))",
        )
    return quantize(value.float(), *qparams.literals)


def _of_other_dtype(value: torch.Tensor, qparams: QParams, name: str) -> InputError:
    dtype = str(qparams.dtype).removeprefix("torch.")
    return InputError(
        f"input {name!r} is {str(value.dtype).removeprefix('torch.')}, and the model takes {dtype}",
        where=f"{name}: {describe_value(value)}, for {qparams}",
        fix=f"{name}.to(torch.{dtype}), if these are its integers; floats are quantized by the model",
    )


def integer_arguments(
    graph: Graph,
    qparams: Mapping[int, QParams],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with quantized tensors and floats, by position, as the plain integers that ``graph``
    reads.

    >>> graph = torch.fx.symbolic_trace(lambda x, y: x + y).graph
    >>> x = torch.quantize_per_tensor(torch.tensor([1.0]), 0.5, 3, torch.quint8)
    >>> integer_arguments(graph, {0: QParams(0.5, 3, 0, 255, torch.uint8)}, (x, 1), {})
    ((tensor([5], dtype=torch.uint8), 1), {})
    """
    names = [str(node.target).lstrip("*") for node in graph.nodes if node.op == "placeholder"]
    found, named = list(args), dict(kwargs)
    for index, wanted in qparams.items():
        if index < len(found):
            found[index] = as_integers(found[index], wanted, names[index])
        elif names[index] in named:
            named[names[index]] = as_integers(named[names[index]], wanted, names[index])
    return tuple(found), named


def received(value: Any, name: str, *literals: Any) -> Any:
    """The inverse of ``as_integers``: plain integers, or floats, as one of PyTorch's quantized tensors.

    >>> integers = torch.tensor([5, 7], dtype=torch.uint8)
    >>> received(integers, "x", 0.5, 3, 0, 255, torch.uint8).dequantize()
    tensor([1., 2.])
    """
    if not isinstance(value, torch.Tensor) or value.is_quantized:
        return value
    qparams = QParams(*literals)
    value = as_integers(value, qparams, name)
    return torch._make_per_tensor_quantized_tensor(value, *qparams.args)


def plain(value: Any) -> Any:
    """The integers of a quantized tensor; anything else as it is.

    >>> plain(torch.quantize_per_tensor(torch.tensor([1.0]), 0.5, 3, torch.quint8)), plain(1)
    (tensor([5], dtype=torch.uint8), 1)
    """
    is_quantized = isinstance(value, torch.Tensor) and value.is_quantized
    return value.int_repr() if is_quantized else value


def receive_plain(graph: Graph, inputs: Mapping[int, QParams | None]) -> None:
    """Let ``graph``, of PyTorch's quantized tensors, take what the model takes that it shows.

    >>> graph = fx.symbolic_trace(lambda x: x.relu()).graph
    >>> receive_plain(graph, {0: QParams(0.5, 3, 0, 255, torch.uint8)})
    >>> fx.GraphModule({}, graph)(torch.tensor([1, 5], dtype=torch.uint8)).int_repr()
    tensor([3, 5], dtype=torch.uint8)
    """
    places = graph.find_nodes(op="placeholder")
    for i, qparams in inputs.items():
        if qparams is not None:
            x = places[i]
            with graph.inserting_after(places[-1]):
                new = graph.call_function(received, (x, x.name, *qparams.literals))
            x.replace_all_uses_with(new)
            new.args = (x, *new.args[1:])


# Checks of inputs before a model's first operator runs.
#
# 1. A NaN or an infinity in an input that is quantized, which becomes a number like others.
#    An input counts where the graph quantizes it as it comes, or after what moves values, converts floats
#    or computes with constants (``(x - mean) / std``). In masks that are added in float both mean something.
# 2. A tensor that reaches beyond its storage, as after ``resize_(0)`` of that: kernels read memory.
#
# Tensors without values (meta, fake) and of other classes are left to what comes next; those on other devices
# than the CPU are not read, since that would wait for the device.

_PLAIN = (torch.Tensor, nn.Parameter)
_SCALARS = (int, float, bool, str, type(None))


class QuantizedInput(NamedTuple):
    """An argument that is quantized, or with ``path`` (keys and positions) a part of it."""

    name: str
    position: int
    path: tuple[int | str, ...] = ()

    def tensor(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """The tensor in a call; ``None`` where there is none at this place."""
        value: Any = args[self.position] if self.position < len(args) else kwargs.get(self.name)
        if isinstance(value, torch.Tensor):
            return value
        for key in self.path:
            try:
                value = value[key]
            except (TypeError, LookupError):
                return None
        return value if isinstance(value, torch.Tensor) else None

    def __str__(self) -> str:
        return self.name + "".join(f"[{key!r}]" for key in self.path)


def quantized_inputs(graph_module: fx.GraphModule) -> tuple[QuantizedInput, ...]:
    """The inputs of rule 1, in the order in which the graph quantizes them.

    >>> class Net(nn.Module):
    ...     def forward(self, x, mask):
    ...         y = (x["image"] - 0.5).flatten(1)
    ...         return torch.quantize_per_tensor(y, 0.1, 0, torch.quint8), mask
    >>> [str(found) for found in quantized_inputs(fx.symbolic_trace(Net()))]
    ["x['image']"]
    """
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    values = [
        source
        for node in reversed(graph_module.graph.nodes)
        for source in _quantized(graph_module, node)
    ]
    return tuple(
        QuantizedInput(str(node.target), placeholders.index(node), path)
        for node, path in inputs_behind(graph_module, values, moves_values)
    )


def _quantized(graph_module: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """The values that ``node`` quantizes."""
    if node.op == "call_module":
        module = get_module(graph_module, str(node.target))
        if isinstance(module, fx.GraphModule):  # a standalone module
            given = [found.position for found in quantized_inputs(module) if not found.path]
            values: Sequence[Any] = [node.args[place] for place in given if place < len(node.args)]
            return [value for value in values if isinstance(value, fx.Node)]
        half = isinstance(module, DynamicLinear) and module.config.weight_dtype == torch.float16
        if half or not isinstance(module, (DynamicLinear, QuantizedRecurrent, QuantizedCell)):
            return []
        return node.all_input_nodes
    name = str(node.target)
    is_ours = node.target in (quantize, torch.quantize_per_tensor)
    if is_ours or name.startswith(("quantized_decomposed.quantize_", "backquant.quantize_")):
        return node.all_input_nodes[:1]
    return []


def check_finite(
    quantized: Sequence[QuantizedInput], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Rule 1. Raises ``InputError``.

    >>> check_finite([QuantizedInput("x", 0)], [torch.tensor([1.0, float("nan")])], {})
    Traceback (most recent call last):
    ...
    backquant.errors.InputError: input 'x' holds 1 NaN and 0 infinite values, and is quantized
      where  x: float32[2]
      fix    model(torch.nan_to_num(x)), or model.check_finite = False, which takes them as numbers in range
    """
    for place in quantized:
        x = place.tensor(args, kwargs)
        if x is None or not x.is_floating_point() or not _is_readable(x):
            continue
        if x.requires_grad:
            x = x.detach()
        # A finite sum proves that all are finite; a sum that overflows does not prove the contrary.
        if math.isfinite(x.sum()) or bool(torch.isfinite(x).all()):
            continue
        missing, endless = int(torch.isnan(x).sum()), int(torch.isinf(x).sum())
        raise InputError(
            f"input {str(place)!r} holds {missing} NaN and {endless} infinite values, and is quantized",
            where=f"{place}: {describe_value(x)}",
            fix=f"model(torch.nan_to_num({place})), or model.check_finite = False, which takes them as "
            "numbers in range",
        )


def check_storages(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Rule 2. Raises ``InputError``.

    >>> x = torch.ones(2, 3)
    >>> freed = x.untyped_storage().resize_(0)
    >>> check_storages([x], {})
    Traceback (most recent call last):
    ...
    backquant.errors.InputError: an input reaches beyond its storage, which has 0 of 24 bytes
      where  float32[2, 3]
      fix    a tensor that holds its values: x.clone() before its storage is freed or resized
    """
    values = (*args, *kwargs.values()) if kwargs else args
    for value in values:
        if type(value) in _PLAIN:
            _check_storage(value)
        elif not isinstance(value, _SCALARS):
            for leaf in tree_leaves(value):
                if type(leaf) in _PLAIN:
                    _check_storage(leaf)


def _check_storage(x: torch.Tensor) -> None:
    if not x.is_cpu or x.layout is not torch.strided or x.is_nested:
        return
    held = x.untyped_storage().nbytes()
    if x.is_contiguous():
        needed = x.nbytes + x.storage_offset() * x.itemsize
    else:
        last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
        needed = (x.storage_offset() + last + 1) * x.itemsize
    if held < needed and x.numel():
        raise InputError(
            f"an input reaches beyond its storage, which has {held} of {needed} bytes",
            where=f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}",
            fix="a tensor that holds its values: x.clone() before its storage is freed or resized",
        )


def _is_readable(x: torch.Tensor) -> bool:
    return type(x) in _PLAIN and x.is_cpu and x.layout is torch.strided and not x.is_nested


# Results never share memory with the model, nor with the result of an earlier call.
#
# What depends on no input (a state of zeros, a table) is a tensor of the graph, computed once; the model that
# was quantized may have made it anew at each call. The caller may write into what it got.


def returned_tensors(graph_module: fx.GraphModule) -> tuple[str, ...]:
    """The tensors of ``graph_module`` whose memory a result may share, by their paths. Cost: linear.

    >>> class Net(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.table = torch.nn.Parameter(torch.ones(2, 2))
    ...         self.bias = torch.nn.Parameter(torch.ones(2))
    ...     def forward(self, x):
    ...         return x + self.bias, self.table[0]
    >>> returned_tensors(fx.symbolic_trace(Net()))
    ('table',)
    """
    found: dict[str, None] = {}
    pending = list(graph_module.graph.output_node().all_input_nodes)
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node.op == "get_attr":
            found[str(node.target)] = None
        elif _passes_on(graph_module, node):
            more = [source for source in node.all_input_nodes if source not in seen]
            seen.update(more)
            pending += more
    return tuple(found)


def _passes_on(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a result may share the memory of an argument."""
    if not node.op.startswith("call_"):
        return False
    called = get_module(module, str(node.target)) if node.op == "call_module" else None
    return is_view(node, called) or changes_argument(node, called)


def with_own_memory(result: Any, graph_module: fx.GraphModule, paths: Iterable[str]) -> Any:
    """``result`` with copies of the tensors in it that share memory with those of ``paths``.

    >>> module = torch.nn.Linear(2, 2)
    >>> kept, other = torch.ones(1), module.bias[:1]
    >>> found = with_own_memory((kept, other), module, ["bias"])
    >>> found[0] is kept, found[1].data_ptr() == other.data_ptr(), torch.equal(found[1], other)
    (True, False, True)
    """
    held = [_memory(attrgetter(path)(graph_module)) for path in paths]
    taken = {address for address in held if address}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone() if _memory(tensor) in taken else tensor

    return tree_map_only(torch.Tensor, own, result)


def _memory(tensor: Any) -> int:
    plain = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if plain else 0
