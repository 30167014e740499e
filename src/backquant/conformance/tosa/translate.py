"""Kernels of the integer reference, and what moves integers between them, as TOSA operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backquant.conformance.tosa.graph import Array, Graph
from backquant.conformance.tosa.moves import Move, moved
from backquant.conformance.tosa.resizes import bilinear, nearest
from backquant.conformance.tosa.scales import NoTosaError, rescaled
from backquant.conformance.tosa.softmax import softmax
from backquant.conformance.tosa.values import binary, join, table
from backquant.conformance.tosa.windows import average, max_pool, weighted
from backquant.lower.kernels.integer.elementwise import IntegerBinary, IntegerJoin
from backquant.lower.kernels.integer.normalized import IntegerSoftmax
from backquant.lower.kernels.integer.pooling import IntegerAverage, IntegerMaxPool
from backquant.lower.kernels.integer.resize import IntegerBilinear
from backquant.lower.kernels.integer.resize import nearest as by_nearest
from backquant.lower.kernels.integer.values import IntegerTable
from backquant.lower.kernels.integer.weighted import IntegerWeighted

_FORMS: dict[type, Callable[..., str]] = {
    IntegerWeighted: weighted,
    IntegerBinary: binary,
    IntegerMaxPool: max_pool,
    IntegerAverage: average,
    IntegerTable: table,
    IntegerJoin: join,
    IntegerBilinear: bilinear,
    IntegerSoftmax: softmax,
}
#: Whose results are images, with their channels last.
_IMAGES = (IntegerWeighted, IntegerMaxPool, IntegerAverage, IntegerBilinear)


def translated(kernel: Any, inputs: Sequence[Tensor], out: Tensor) -> tuple[Graph, str]:
    """The graph of one kernel called with ``inputs``, and the tensor of its result; or ``NoTosaError``."""
    form = _FORMS.get(type(kernel))
    if form is None:
        raise NoTosaError(type(kernel).__name__)
    graph = Graph()
    arrays = [value.contiguous().numpy() for value in inputs]
    return graph, form(graph, kernel, arrays, out.numpy())


def translated_move(move: Move, x: Tensor) -> tuple[Graph, str]:
    """The graph of ``move(x)``, and the tensor of its result; or ``NoTosaError``."""
    graph = Graph()
    return graph, moved(graph, move, x.contiguous().numpy())


def translated_rescale(x: Tensor, out: Tensor, arguments: Sequence[Any]) -> tuple[Graph, str]:
    """As ``translated_move``, of ``values.rescale`` with its other ``arguments``."""
    graph = Graph()
    scale, zero, out_scale, out_zero = arguments[:4]
    dtype, source = (str(each.numpy().dtype) for each in (out, x))
    name = rescaled(
        graph, graph.given(x.contiguous().numpy()), out.shape, scale / out_scale, dtype,
        source=source, zero=zero, out_zero=out_zero,
    )  # fmt: skip
    return graph, name


def translated_nearest(move: Move, x: Tensor) -> tuple[Graph, str]:
    """As ``translated_move``, where ``move`` takes the nearest neighbours of an image."""
    graph = Graph()
    out = move(x).numpy()
    rows = move(torch.arange(x.shape[2]).reshape(1, 1, -1, 1).expand(x.shape))
    columns = move(torch.arange(x.shape[3]).expand(x.shape))
    places = [rows[0, 0, :, 0].numpy(), columns[0, 0, 0].numpy()]
    return graph, nearest(graph, x.contiguous().numpy(), out, places)


def in_our_order(found: Array, out: Tensor, kernel: Any) -> Array:
    """The result of TOSA in the order of axes that PyTorch has. ``kernel``: one of the integer reference, or
    the function that moves values."""
    name = getattr(getattr(kernel, "config", None), "operator", "")
    images = kernel is by_nearest or isinstance(kernel, _IMAGES)
    if images and name not in ("linear", "mean"):
        found = np.moveaxis(found, -1, 1)
    return found.reshape(out.shape)
