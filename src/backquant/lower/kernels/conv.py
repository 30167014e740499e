"""Convolutions on plain integer tensors by oneDNN."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from backquant.dtypes import QParams
from backquant.lower.kernels.boundary import quantize
from backquant.lower.kernels.geometry import output_size
from backquant.lower.kernels.onednn_conv import OnednnConvolution
from backquant.lower.kernels.packed import PACKINGS, WeightTensors
from backquant.lower.kernels.planned import Planned
from backquant.lower.kernels.postop import PostOp, with_post_op
from backquant.lower.kernels.prepared import (
    ConvWeight,
    engine_for,
    engine_for_line,
    is_plain,
    prepared_conv,
)
from backquant.lower.kernels.repacked import pack_linear
from backquant.lower.kernels.self_check import folds_zero_exactly
from backquant.lower.kernels.views import as_quantized, integer_view
from backquant.lower.kernels.zero_point import (
    covers_rounding,
    fold_zero_point,
    has_short_sums,
    pad_with,
    plan_padding,
    rounds_within,
)
from backquant.lower.qdq import quantized_value
from backquant.native.plan import Result, Shape

# takes floats, quantizes them, multiplies, and returns floats
_by_fbgemm = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
_FUNCTIONS = {"swish": F.silu, "hardswish": F.hardswish}


@dataclass(frozen=True)
class ConvConfig:
    """All numbers of one convolution. ``out_dtype`` float32 gives a float result (scale 1, zero
    point 0). The tuples have one entry per spatial dimension, at most three. ``rounds_once``: the
    reference model rounds before the post-op, too."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    x_scale: float
    x_zero_point: int
    out_scale: float
    out_zero_point: int
    out_dtype: torch.dtype
    post_op: str = "none"
    post_numbers: tuple[float, ...] = ()
    post_algorithm: str = ""
    rounds_once: bool = False


class OnednnConv(OnednnConvolution):
    """``onednn::qconv_pointwise``: 1d, 2d or 3d convolution, bias and one unary operator.

    In 1d and 2d, with ReLU or nothing behind, the first few shapes of inputs run on primitives that are
    kept (``backquant.lower.kernels.prepared``); 1d as 2d of images of one line. Other 1×1 convolutions are
    ``onednn::qlinear_pointwise``, whose packed weight suits every size.

    Takes uint8 ``[batch, in, ...]`` of any batch and spatial size, in any memory format (channels
    last is the fast one), and returns ``[batch, out, ...]`` of ``config.out_dtype``, channels last.
    The weight is int8 ``[out, in / groups, ...]`` with zero points 0.

    >>> config = ConvConfig((1, 1), (0, 0), (1, 1), 1, 0.5, 10, 0.5, 0, torch.uint8, "relu")
    >>> one = torch.ones(1, 1, 1, 1, dtype=torch.int8)
    >>> tensors = WeightTensors(one, torch.ones(1), torch.zeros(1, dtype=torch.int64), None)
    >>> kernel = OnednnConv(config, tensors)
    >>> kernel(torch.tensor([[[[8, 14]]]], dtype=torch.uint8)).flatten()
    tensor([0, 4], dtype=torch.uint8)
    """

    config_class = ConvConfig
    kernel = "onednn.qconv_pointwise"
    config: ConvConfig

    def __init__(self, config: ConvConfig, tensors: WeightTensors) -> None:
        super().__init__(config, tensors)
        c = config
        self.is_linear = self._is_point and not any(c.padding) and c.groups == 1
        self._is_line = len(c.stride) == 1
        post_op = PostOp(c.post_op, c.post_numbers, c.post_algorithm)
        self._prepared_name = _prepared_name(post_op, c)
        self._prepared: dict[tuple[int, ...], Any] = {}
        self._planned = _planned(tensors.weight, c)
        is_precise = c.out_dtype.itemsize > 1 or rounds_within(
            self.weight, self.weight_scale, c.x_scale, c.x_zero_point, c.out_scale
        )
        self._planned.is_precise = is_precise
        short = set(self._window.kernel) == {1} or has_short_sums(tensors.weight, c.groups)
        summed = short and (any(c.padding) or bool(self._prepared_name))
        summed = summed or not (
            self._prepared_name
            or c.out_dtype.itemsize == 1
            or folds_zero_exactly()
            or covers_rounding(self.weight, self.weight_scale, self.bias, c.x_scale, c.x_zero_point)
        )
        self._padding = plan_padding(c.padding, c.x_zero_point, summed or not is_precise)
        self._geometry = (list(c.stride), self._padding.inside, list(c.dilation), c.groups)
        inside = self.is_linear or post_op.applied_by_conv(len(c.stride))
        self._clamp = None if inside else _bounds(post_op, c)
        self._out = (
            c.out_scale,
            c.out_zero_point,
            c.out_dtype,
            c.post_op if inside else "none",
            list(c.post_numbers) if inside else [],
            c.post_algorithm if inside else "",
        )

    @property
    def name(self) -> str:
        kernel = self._planned.named(f"onednn.qconv{len(self.config.stride)}d_pointwise")
        return with_post_op(kernel, self.config.post_op, self.config.rounds_once)

    @property
    def clamp_bounds(self) -> tuple[float, float] | None:
        """What the output is clamped to after the kernel, as it leaves it; ``None``: nothing."""
        return self._clamp

    def _prepared_for(self, shape: tuple[int, ...]) -> Any:
        """The object that runs ``_prepared_name`` for inputs of ``shape``; ``None`` if there is none, or
        for too many shapes already. fbgemm's serves all of them."""
        if not self._prepared_name:
            return None
        engine = self._engine(shape)
        key = () if engine == "fbgemm" else shape
        found = self._prepared.get(key)
        if found is None and (not key or len(self._prepared) < PACKINGS):
            c, padding = self.config, self._padding
            scale = self.weight_scale
            bias = fold_zero_point(self.weight, scale, self.bias, c.x_scale, padding.folded)
            conv = ConvWeight(self.weight, scale, bias, *self._geometry)
            conv = conv.as_image() if self._is_line else conv
            found = self._prepared[key] = prepared_conv(conv, engine)
        return found

    def _engine(self, shape: tuple[int, ...]) -> str:
        rows = math.prod(shape) // shape[1]
        if self._is_line and self.config.groups == 1:
            positions = rows // self.config.stride[0]
            return engine_for_line(positions * self.weight.numel())
        return engine_for(rows if self.is_linear else math.inf)

    def _derived(self) -> dict[str, Any]:
        return {**super()._derived(), "_prepared": {}}

    def _pack(self, size: tuple[int, ...]) -> Any:
        if not self.is_linear:
            return super()._pack(size)
        folded, scale = self._padding.folded, self.config.x_scale
        weight = torch.ops.onednn.qlinear_prepack(self.weight.flatten(1).contiguous(), None)
        bias = fold_zero_point(self.weight, self.weight_scale, self.bias, scale, folded)
        return weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """uint8 ``[batch, in, ...]`` to ``[batch, out, ...]``; also without a batch."""
        self.check_input(x)
        dims = len(self._least)
        if x.dim() == dims + 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        size = x.shape[2:]
        if not x.numel():
            shape = (x.shape[0], self.weight.shape[0], *output_size(size, self._window))
            return torch.empty(shape, dtype=self.config.out_dtype)
        if self._planned.takes(x):
            return self._planned.convolution(self, x)
        lying = self._lying(x)
        if lying is not None:
            return lying.forward(x.transpose(2, 3)).transpose(2, 3)
        instead = self._instead(x)
        if instead is not None:
            return instead[0].forward(instead[1])
        padding = self._padding
        if padding.before is not None:
            x = pad_with(x, padding.before, self.config.x_zero_point)
        prepared = self._prepared_for(x.shape) if is_plain(x) else None
        if prepared is not None:
            return self._by_prepared(x, prepared)
        if self.is_linear:
            by_float = self._is_few_by_float(x)
            return self._few_by_float(x) if by_float else self._linear(x)
        weight, bias = self.packed_for(x.shape[2:])
        out: torch.Tensor = torch.ops.onednn.qconv_pointwise.default(
            x,
            self.config.x_scale,
            padding.zero_point,
            weight,
            self.weight_scale,
            self.weight_zero_point,
            bias,
            *self._geometry,
            *self._out,
        )
        return out if self._clamp is None else out.clamp_(*self._clamp)

    def _by_prepared(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        c = self.config
        image = x.unsqueeze(2) if self._is_line else x
        q = as_quantized(image, c.x_scale, self._padding.zero_point)
        operator = getattr(torch.ops.quantized, self._prepared_name).new
        out = integer_view(operator(q, prepared, c.out_scale, c.out_zero_point))
        return out.squeeze(2) if self._is_line else out

    def _is_few_by_float(self, x: torch.Tensor) -> bool:
        """Whether ``x`` is a few images of one pixel, and an activation follows that is fast on floats."""
        c = self.config
        known = c.post_op in _FUNCTIONS and c.out_dtype == torch.uint8 and len(c.stride) == 2
        few = known and is_plain(x) and tuple(x.shape[2:]) == (1, 1)
        return few and self._engine(x.shape) == "fbgemm"

    def _few_by_float(self, x: torch.Tensor) -> torch.Tensor:
        """fbgemm's product in float, the activation, one rounding."""
        c = self.config
        packed = self._prepared.get(())
        if packed is None:
            weight, zeros = self.weight.flatten(1), self.weight_zero_point
            packed = pack_linear("fbgemm", weight, self.weight_scale, zeros, self.bias)
            self._prepared[()] = packed
        value = as_quantized(x, c.x_scale, c.x_zero_point).dequantize().flatten(1)
        value = _FUNCTIONS[c.post_op](_by_fbgemm(value, c.x_scale, c.x_zero_point, packed))
        value = value.view(*value.shape, 1, 1)
        return quantize(value, c.out_scale, c.out_zero_point, 0, 255, torch.uint8)

    def _linear(self, x: torch.Tensor) -> torch.Tensor:
        """A 1×1 convolution as a linear layer over the channels, whose layout suits every size."""
        weight, bias = self.packed_for(())
        out: torch.Tensor = torch.ops.onednn.qlinear_pointwise.default(
            x.movedim(1, -1).contiguous(),
            self.config.x_scale,
            self._padding.zero_point,
            weight,
            self.weight_scale,
            self.weight_zero_point,
            bias,
            *self._out,
        )
        return out.movedim(-1, 1)


def _planned(weight: torch.Tensor, c: ConvConfig) -> Planned:
    result = Result(
        *(c.out_scale, c.out_zero_point, c.out_dtype),
        *(c.post_op, c.post_numbers, c.post_algorithm),
    )
    before = (1,) * (2 - len(c.stride))
    shape = Shape(
        (*weight.shape[:2], *before, *weight.shape[2:]),
        (*before, *c.stride),
        (*(0 for _ in before), *c.padding),
        (*before, *c.dilation),
        c.groups,
    )
    return Planned(len(c.stride), shape, (c.x_scale, c.x_zero_point), result)


def _prepared_name(post_op: PostOp, config: ConvConfig) -> str:
    """The operator on quantized tensors that does the same; empty if there is none."""
    if len(config.stride) > 2 or config.out_dtype != torch.uint8:
        return ""
    if post_op.name == "none":
        return "conv2d"
    if post_op.name not in ("relu", "hardtanh"):
        return ""
    # A clamp at the ends of the range is what saturation does.
    is_relu = _bounds(post_op, config) == (config.out_zero_point, 255)
    return "conv2d_relu" if is_relu else ""


def _bounds(clamp: PostOp, config: ConvConfig) -> tuple[float, float]:
    """A clamp of the output as it leaves the kernel; rounding is monotone, so this is exact."""
    if config.out_dtype == torch.float32:
        return clamp.bounds
    full = QParams(config.out_scale, config.out_zero_point, 0, 255, config.out_dtype)
    low, high = (quantized_value(bound, full) for bound in clamp.bounds)
    return low, high
