"""Quantized tensors at the inputs and outputs of a model, as plain integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph

from backquant.dtypes import QParams
from backquant.lower.kernels.boundary import quantize


def as_integers(value: Any, qparams: QParams) -> Any:
    """A quantized tensor as plain integers under ``qparams``; anything else as it is.

    >>> tensor = torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.5, 3, torch.quint8)
    >>> as_integers(tensor, QParams(0.5, 3, 0, 255, torch.uint8))
    tensor([5, 7], dtype=torch.uint8)
    >>> as_integers(tensor, QParams(1.0, 0, 0, 255, torch.uint8))
    tensor([1, 2], dtype=torch.uint8)
    """
    if not isinstance(value, torch.Tensor) or not value.is_quantized:
        return value
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        same = (value.q_scale(), value.q_zero_point()) == qparams.args
        if same and value.int_repr().dtype == qparams.dtype and qparams.is_full_range:
            return value.int_repr()
    return quantize(value.dequantize(), *qparams.literals)


def integer_arguments(
    graph: Graph,
    qparams: Mapping[int, QParams],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    form: Callable[[Any, QParams], Any] = as_integers,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with quantized tensors, by position, as the plain integers that ``graph`` reads; or in
    another ``form``.

    >>> graph = torch.fx.symbolic_trace(lambda x, y: x + y).graph
    >>> x = torch.quantize_per_tensor(torch.tensor([1.0]), 0.5, 3, torch.quint8)
    >>> integer_arguments(graph, {0: QParams(0.5, 3, 0, 255, torch.uint8)}, (x, 1), {})
    ((tensor([5], dtype=torch.uint8), 1), {})
    """
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    found, named = list(args), dict(kwargs)
    for index, wanted in qparams.items():
        if index < len(found):
            found[index] = form(found[index], wanted)
        elif names[index] in named:
            named[names[index]] = form(named[names[index]], wanted)
    return tuple(found), named


def as_quantized(value: Any, qparams: QParams) -> Any:
    """The inverse of ``as_integers``: plain integers as one of PyTorch's quantized tensors.

    >>> integers = torch.tensor([5, 7], dtype=torch.uint8)
    >>> as_quantized(integers, QParams(0.5, 3, 0, 255, torch.uint8)).dequantize()
    tensor([1., 2.])
    """
    if not isinstance(value, torch.Tensor) or value.is_quantized or value.dtype != qparams.dtype:
        return value
    return torch._make_per_tensor_quantized_tensor(value, *qparams.args)


def plain(value: Any) -> Any:
    """The integers of a quantized tensor; anything else as it is.

    >>> plain(torch.quantize_per_tensor(torch.tensor([1.0]), 0.5, 3, torch.quint8)), plain(1)
    (tensor([5], dtype=torch.uint8), 1)
    """
    is_quantized = isinstance(value, torch.Tensor) and value.is_quantized
    return value.int_repr() if is_quantized else value
