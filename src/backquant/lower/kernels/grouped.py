"""Linear layers of groups of rows (``backquant.graph.grouped``) on integers, by oneDNN.

One operator multiplies all groups: how many rows each has is known when it is called, and a recording of
calls or a compiler sees an operator whose result depends on its arguments alone. It packs the matrices of
a weight when it first sees it, and again when the weight has changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from backquant.errors import InputError
from backquant.graph import register_quantized_decomposed
from backquant.graph.grouped import columns, spans
from backquant.lower.kernels.linear import LinearConfig, OnednnLinear
from backquant.lower.kernels.packed import PackedKernel, WeightTensors

_LIBRARY = torch.library.Library("backquant", "FRAGMENT")
_WEIGHT = "Tensor offsets, Tensor weight, Tensor weight_scale"
_LIBRARY.define(
    f"grouped_qlinear(Tensor x, float x_scale, int x_zero_point, {_WEIGHT}, "
    "float out_scale, int out_zero_point, ScalarType out_dtype) -> Tensor"
)
_LIBRARY.define(f"grouped_qlinear_dynamic(Tensor x, {_WEIGHT}, int quant_max, float eps) -> Tensor")
#: By weight: the kernels of its groups, and its version, scales and settings, to see whether they still hold.
_KERNELS: Any = WeakTensorKeyDictionary()


def _kernels(
    weight: Tensor, scale: Tensor, groups: int, config: LinearConfig
) -> list[OnednnLinear]:
    state = (weight._version, scale._version, groups, config)
    found = _KERNELS.get(weight)
    if found is None or found[0] != state:
        found = _KERNELS[weight] = (state, list(_made(weight, scale, groups, config)))
    return found[1]  # type: ignore[no-any-return]


def _made(
    weight: Tensor, scale: Tensor, groups: int, config: LinearConfig
) -> Iterator[OnednnLinear]:
    width = weight.shape[0] // groups
    zeros = torch.zeros(width, dtype=torch.int64)
    scales = scale.expand(weight.shape[0])
    for first in range(0, weight.shape[0], width):
        rows = slice(first, first + width)
        yield OnednnLinear(config, WeightTensors(weight[rows], scales[rows].clone(), zeros, None))


def _multiplied(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    offsets: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    out_scale: float,
    out_zero_point: int,
    out_dtype: torch.dtype,
) -> Tensor:
    config = LinearConfig(x_scale, x_zero_point, out_scale, out_zero_point, out_dtype)
    width = columns(weight, offsets)
    kernels = _kernels(weight, weight_scale, offsets.shape[0], config)
    filled = 0 if out_dtype.is_floating_point else out_zero_point
    out = x.new_full((x.shape[0], width), filled, dtype=out_dtype)
    for group, begin, end in spans(offsets, x.shape[0]):
        out[begin:end] = kernels[group](x[begin:end])
    return out


def _multiplied_dynamic(
    x: Tensor, offsets: Tensor, weight: Tensor, weight_scale: Tensor, quant_max: int, eps: float
) -> Tensor:
    register_quantized_decomposed()
    ops = torch.ops.quantized_decomposed
    x = x.float()
    scale, zero_point = ops.choose_qparams.tensor(x, 0, quant_max, eps, torch.uint8)
    qparams = float(scale), int(zero_point)
    q = ops.quantize_per_tensor.default(x, *qparams, 0, quant_max, torch.uint8)
    width = columns(weight, offsets)
    kernels = _kernels(weight, weight_scale, offsets.shape[0], LinearConfig(1, 0, 1, 0, q.dtype))
    out = x.new_zeros((x.shape[0], width))
    for group, begin, end in spans(offsets, x.shape[0]):
        kernel = kernels[group]
        out[begin:end] = torch.ops.onednn.qlinear_pointwise.default(
            q[begin:end], *qparams, kernel.packed_for(())[0], kernel.weight_scale,
            kernel.weight_zero_point, None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
    return out


def _shape(x: Tensor, *args: Any) -> Tensor:
    offsets, weight, *_, dtype = args[2:]
    return x.new_empty((x.shape[0], columns(weight, offsets)), dtype=dtype)


def _dynamic_shape(x: Tensor, offsets: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], columns(weight, offsets)), dtype=torch.float32)


_LIBRARY.impl("grouped_qlinear", _multiplied, "CPU")
_LIBRARY.impl("grouped_qlinear_dynamic", _multiplied_dynamic, "CPU")
torch.library.register_fake("backquant::grouped_qlinear", _shape, lib=_LIBRARY)
torch.library.register_fake("backquant::grouped_qlinear_dynamic", _dynamic_shape, lib=_LIBRARY)


@dataclass(frozen=True)
class GroupedConfig:
    """As ``LinearConfig``; of a layer that is quantized at each call the numbers of input and result are
    not read, and ``quant_max`` is the largest integer of its input."""

    x_scale: float = 1.0
    x_zero_point: int = 0
    out_scale: float = 1.0
    out_zero_point: int = 0
    out_dtype: torch.dtype = torch.float32
    is_dynamic: bool = False
    quant_max: int = 255
    eps: float = 0.0


class GroupedLinear(PackedKernel):
    """Rows ``[rows, in]`` and the ends of their groups to ``[rows, out]``: uint8, or float where it
    ``is_dynamic``. The weight is int8 ``[groups * out, in]`` with zero points 0. Rows behind the last group
    are 0.

    >>> config = GroupedConfig(0.5, 10)
    >>> two = torch.tensor([[1, 1], [3, 3]], dtype=torch.int8)
    >>> tensors = WeightTensors(two, torch.ones(1), torch.zeros(1, dtype=torch.int64), None)
    >>> x = torch.tensor([[11, 12], [11, 12], [11, 12]], dtype=torch.uint8)
    >>> GroupedLinear(config, tensors)(x, torch.tensor([1, 2]))
    tensor([[1.5000],
            [4.5000],
            [0.0000]])
    """

    config_class = GroupedConfig
    config: GroupedConfig

    def __init__(self, config: GroupedConfig, tensors: WeightTensors) -> None:
        super().__init__(config, tensors)

    @property
    def name(self) -> str:
        return "onednn.qlinear_pointwise(grouped%s)" % (
            ", dynamic" if self.config.is_dynamic else ""
        )

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Raises ``InputError`` for rows, or a number of groups, that do not fit the weight."""
        c, weight = self.config, (offsets, self.weight, self.weight_scale)
        is_rows = x.dim() == 2 and x.shape[1] == self.weight.shape[1]
        is_read = x.is_floating_point() if c.is_dynamic else x.dtype == torch.uint8
        groups = offsets.shape[0] if offsets.dim() == 1 and not offsets.is_floating_point() else 0
        if not (is_rows and is_read and groups) or self.weight.shape[0] % groups:
            kind = "floats" if c.is_dynamic else "8-bit integers"
            raise InputError(
                f"{self.name} takes {kind} [rows, {self.weight.shape[1]}] and the ends of groups",
                where=f"{str(x.dtype)[6:]}{list(x.shape)}, {str(offsets.dtype)[6:]}{list(offsets.shape)}",
                fix="inputs of the shape that the float model takes",
            )
        ops = torch.ops.backquant
        if c.is_dynamic:
            made: Tensor = ops.grouped_qlinear_dynamic.default(x, *weight, c.quant_max, c.eps)
            return made.to(x.dtype)
        out = (c.out_scale, c.out_zero_point, c.out_dtype)
        result: Tensor = ops.grouped_qlinear.default(x, c.x_scale, c.x_zero_point, *weight, *out)
        return result
