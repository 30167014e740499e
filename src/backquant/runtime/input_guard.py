"""Checks of inputs before a model's first operator runs.

1. A NaN or an infinity in an input that is quantized, which becomes a number like others.
   An input counts where the graph quantizes it as it comes, or after what moves values, converts floats
   or computes with constants (``(x - mean) / std``). In masks that are added in float both mean something.
2. A tensor that reaches beyond its storage, as after ``resize_(0)`` of that: kernels read memory.

Tensors without values (meta, fake) and of other classes are left to what comes next; those on other devices
than the CPU are not read, since that would wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from backquant.errors import InputError
from backquant.graph import get_module
from backquant.graph.example import describe_value
from backquant.graph.inputs_behind import inputs_behind
from backquant.lower.kernels.boundary import quantize
from backquant.lower.kernels.linear_dynamic import DynamicLinear
from backquant.lower.kernels.recurrent import QuantizedCell, QuantizedRecurrent
from backquant.operators import moves_values

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
