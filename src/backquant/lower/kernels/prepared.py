"""Convolutions whose oneDNN primitive is kept between calls.

``onednn::qconv_pointwise`` describes its primitive anew at every call, 13 µs of the 19 that it takes
beside the multiplication. ``quantized::conv2d`` with a weight packed for torch's engine ``onednn``
runs the same primitive, bit for bit, and keeps it: for one shape of the input, the first that it sees. It
takes quantized tensors in place of plain integers, and knows no activation but ReLU.

Linear layers are the same: ``quantized::linear`` keeps its primitive, ``onednn::qlinear_pointwise`` takes
25 to 50 µs more (AMX, torch 2.13).

For a few rows, like the 1×1 maps of squeeze-excite blocks and a classifier's one row, and for small
products, the same operators on weights packed for ``fbgemm`` take half of that time (5 in place of 11 µs),
and a third of ``onednn::qlinear_pointwise``'s on a row of 1,280 that is not in the cache. Its sums are
exact under the same conditions as oneDNN's; what rounds is a product in float32 in both.

Source: the op schemas ``quantized::conv2d_prepack`` and ``quantized::conv2d``. That its primitives are
found by the shape of the *result* (measured on torch 2.13) is why each input shape has its own object.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from backquant.lower.kernels.engine_setting import packing_for
from backquant.lower.kernels.views import quantized_weight
from backquant.lower.machine import quantized_engines

_FEW_ROWS = 8
_SMALL_ROWS, _SMALL_WORK = 64, 1 << 22
_SMALL_LINE = 1_300_000


def engine_for(rows: float, multiply_adds: float = math.inf) -> str:
    """Which of torch's engines multiplies so many rows by a matrix the fastest; depends on nothing else.

    ``multiply_adds``: of the whole product; small products of more rows go to fbgemm, too.

    >>> engine_for(1000), engine_for(32), engine_for(32, 32 * 128 * 512)
    ('onednn', 'onednn', 'fbgemm')
    """
    small = rows <= _SMALL_ROWS and multiply_adds <= _SMALL_WORK
    few = (rows <= _FEW_ROWS or small) and "fbgemm" in quantized_engines()
    return "fbgemm" if few else "onednn"


def engine_for_line(multiply_adds: float) -> str:
    """The same for a convolution over one dimension, in one group.

    >>> engine_for_line(10**7)
    'onednn'
    """
    small = multiply_adds <= _SMALL_LINE
    is_here = "fbgemm" in quantized_engines()
    return "fbgemm" if small and is_here else "onednn"


@dataclass(frozen=True)
class ConvWeight:
    """int8 ``weight`` ``[out, in / groups, height, width]`` with zero points 0, float32 ``scale`` (one
    entry, or ``[out]``), float32 ``bias`` ``[out]`` or None, and the geometry of the convolution."""

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    def as_image(self) -> ConvWeight:
        """A convolution over one dimension as the same over images of one line."""
        return replace(
            self,
            weight=self.weight.unsqueeze(2),
            stride=(1, *self.stride),
            padding=(0, *self.padding),
            dilation=(1, *self.dilation),
        )


def is_plain(x: torch.Tensor) -> bool:
    """Whether ``x`` is what a prepared object takes: memory with something in it, and no compiler's or
    tracer's stand-in, who know quantized tensors not.

    >>> is_plain(torch.ones(1)), is_plain(torch.ones(0))
    (True, False)
    """
    return type(x) is torch.Tensor and x.numel() > 0 and not torch.compiler.is_compiling()


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """``x`` with its channels last, if it is an image or a volume."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else x


def prepared_conv(conv: ConvWeight, engine: str = "onednn") -> Any:
    """The object that ``quantized::conv2d`` takes, for inputs of one shape.

    >>> one = torch.ones(1, 1, 1, 1, dtype=torch.int8)
    >>> conv = ConvWeight(one, torch.ones(1), None, (1, 1), (0, 0), (1, 1), 1)
    >>> x = torch.quantize_per_tensor(torch.ones(1, 1, 2, 2), 0.5, 0, torch.quint8)
    >>> torch.ops.quantized.conv2d(x, prepared_conv(conv), 0.25, 3).int_repr().flatten()
    tensor([7, 7, 7, 7], dtype=torch.uint8)
    """
    weight = quantized_weight(conv.weight, conv.scale)
    lists = (list(conv.stride), list(conv.padding), list(conv.dilation))
    with packing_for(engine):
        return torch.ops.quantized.conv2d_prepack(weight, conv.bias, *lists, conv.groups)
