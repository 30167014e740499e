"""Quantized tensors at the inputs and outputs of a model, as plain integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph

from backquant.dtypes import QParams
from backquant.errors import InputError
from backquant.graph.example import describe_value
from backquant.lower.kernels.boundary import quantize


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
    form: Callable[[Any, QParams, str], Any] = as_integers,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with quantized tensors and floats, by position, as the plain integers that ``graph``
    reads; or in another ``form``.

    >>> graph = torch.fx.symbolic_trace(lambda x, y: x + y).graph
    >>> x = torch.quantize_per_tensor(torch.tensor([1.0]), 0.5, 3, torch.quint8)
    >>> integer_arguments(graph, {0: QParams(0.5, 3, 0, 255, torch.uint8)}, (x, 1), {})
    ((tensor([5], dtype=torch.uint8), 1), {})
    """
    names = [str(node.target).lstrip("*") for node in graph.nodes if node.op == "placeholder"]
    found, named = list(args), dict(kwargs)
    for index, wanted in qparams.items():
        if index < len(found):
            found[index] = form(found[index], wanted, names[index])
        elif names[index] in named:
            named[names[index]] = form(named[names[index]], wanted, names[index])
    return tuple(found), named


def as_quantized(value: Any, qparams: QParams, name: str = "") -> Any:
    """The inverse of ``as_integers``: plain integers, or floats, as one of PyTorch's quantized tensors.

    >>> integers = torch.tensor([5, 7], dtype=torch.uint8)
    >>> as_quantized(integers, QParams(0.5, 3, 0, 255, torch.uint8)).dequantize()
    tensor([1., 2.])
    """
    if not isinstance(value, torch.Tensor) or value.is_quantized:
        return value
    value = as_integers(value, qparams, name)
    return torch._make_per_tensor_quantized_tensor(value, *qparams.args)


def plain(value: Any) -> Any:
    """The integers of a quantized tensor; anything else as it is.

    >>> plain(torch.quantize_per_tensor(torch.tensor([1.0]), 0.5, 3, torch.quint8)), plain(1)
    (tensor([5], dtype=torch.uint8), 1)
    """
    is_quantized = isinstance(value, torch.Tensor) and value.is_quantized
    return value.int_repr() if is_quantized else value
