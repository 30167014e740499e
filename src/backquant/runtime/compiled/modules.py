"""The kernel modules of a lowered graph in operators that can be compiled.

``spelled`` gives the module that takes a kernel module's place; the integers of weights are shared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.lower.kernels.configured import KernelModule
from backquant.lower.kernels.conv import OnednnConv
from backquant.lower.kernels.conv_add import OnednnConvAdd
from backquant.lower.kernels.grouped import GroupedLinear
from backquant.lower.kernels.linear import OnednnLinear
from backquant.lower.kernels.linear_dynamic import DynamicLinear
from backquant.lower.kernels.lookup import Lookup
from backquant.lower.kernels.norm import BatchNorm, Norm
from backquant.lower.kernels.packed import PackedKernel
from backquant.lower.kernels.postop import PostOp
from backquant.lower.kernels.quantized import QuantizedWeighted
from backquant.runtime.compiled import images, operators
from backquant.runtime.compiled.as_run import AS_RUN, AsItRuns
from backquant.runtime.compiled.dynamic import dynamic_linear
from backquant.runtime.compiled.functions import as_float, as_integer
from backquant.runtime.compiled.transposed import TransposedConvolution

_FEW = 1 << 16  # values


class _Weighted(nn.Module):
    """The integers of a kernel. Scales and biases are columns: Inductor inlines short vectors."""

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, kernel: PackedKernel) -> None:
        super().__init__()
        self.register_buffer("weight", kernel.weight)
        self.register_buffer("scale", kernel.weight_scale.reshape(-1, 1))
        bias = kernel.bias
        self.register_buffer("bias", None if bias is None else bias.reshape(-1, 1))
        self.config = kernel.config

    @property
    def source(self) -> tuple[Any, ...]:
        c = self.config
        return c.x_scale, c.x_zero_point, self.weight, self.scale, self.bias

    @property
    def geometry(self) -> tuple[Any, ...]:
        c = self.config
        return list(c.stride), list(c.padding), list(c.dilation), c.groups


class _Linear(_Weighted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c = self.config
        out = (c.out_scale, c.out_zero_point, c.out_dtype)
        post_op = (c.post_op, list(c.post_numbers), c.post_algorithm)
        made: torch.Tensor = operators.linear(x, *self.source, *out, *post_op)
        return made


class _Convolution(_Weighted):
    """Clamps that oneDNN's 1d and 3d kernels lack follow in integers.

    Convolutions of one dimension that give few values are those of images of one row, which there are
    kernels for: oneDNN's take 40 µs before they begin. Many values stay in the order of ``[batch, channels,
    length]``: the code that reads them loses more on channels last than the kernel gains.
    """

    def __init__(self, kernel: OnednnConv) -> None:
        super().__init__(kernel)
        c = self.config
        self.is_row = len(c.stride) == 1
        post_op = PostOp(c.post_op, c.post_numbers, c.post_algorithm)
        inside = post_op.applied_by_conv(len(c.stride))
        self.clamp = None if inside else kernel.clamp_bounds
        self.post_op: tuple[Any, ...] = (c.post_op, list(c.post_numbers), c.post_algorithm)
        self.own_post_op: tuple[Any, ...] = self.post_op if inside else ("none", [], "")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c = self.config
        out = (None, 1.0, 0, c.out_scale, c.out_zero_point, c.out_dtype)
        made: torch.Tensor
        if self.is_row and self._outputs(x) <= _FEW:
            # kernels want one stride; of one row both make one
            geometry = (2 * c.stride, (0, *c.padding), (1, *c.dilation), c.groups)
            source = (c.x_scale, c.x_zero_point, self.weight.unsqueeze(2), self.scale, self.bias)
            row = x.unsqueeze(2)
            made = operators.convolution(row, *source, *geometry, *out, *self.post_op)
            return made.squeeze(2)
        if self._is_column(x):
            geometry = (c.stride[::-1], c.padding[::-1], c.dilation[::-1], c.groups)
            line = self.weight.transpose(2, 3)
            source = (c.x_scale, c.x_zero_point, line, self.scale, self.bias)
            made = operators.convolution(
                x.transpose(2, 3), *source, *geometry, *out, *self.own_post_op
            ).transpose(2, 3)
        else:
            made = operators.convolution(x, *self.source, *self.geometry, *out, *self.own_post_op)
        return made if self.clamp is None else torch.clamp(made, *self.clamp)

    def _is_column(self, x: torch.Tensor) -> bool:
        """Whether it slides along a column of one pixel: oneDNN is several times as fast along a line."""
        kernel, c = self.weight.shape[2:], self.config
        slides = len(kernel) == 2 and kernel[1] == 1 and kernel[0] > 1 and not c.padding[1]
        width = x.shape[-1]
        return slides and isinstance(width, int) and width == 1

    def _outputs(self, x: torch.Tensor) -> int:
        """How many values it gives, of sizes that are known."""
        spatial = operators.output_size(x.shape[2:], self.weight.shape[2:], self.geometry)
        known = [size for size in (x.shape[0], *spatial) if isinstance(size, int)]
        return math.prod(known, start=self.weight.shape[0])


class _ConvolutionAdd(_Weighted):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        c = self.config
        out: Any = (
            c.out_scale,
            c.out_zero_point,
            torch.uint8,
            "relu" if c.relu else "none",
            [],
            "",
        )
        spatial = operators.output_size(x.shape[2:], self.weight.shape[2:], self.geometry)
        shape = (x.shape[0], self.weight.shape[0], *spatial)
        if torch.broadcast_shapes(other.shape, shape) == shape:
            made: torch.Tensor = operators.convolution(
                *(x, *self.source, *self.geometry),
                *(other.expand(shape), c.other_scale, c.other_zero_point, *out),
            )
            return made
        plain: Any = (1.0, 0, torch.float32, "none", [], "")
        alone = operators.convolution(x, *self.source, *self.geometry, None, 1.0, 0, *plain)
        total = alone + as_float(other, c.other_scale, c.other_zero_point)
        total = total.relu() if c.relu else total
        return as_integer(total, c.out_scale, c.out_zero_point, torch.uint8)


class _Lookup(nn.Module):
    table: torch.Tensor

    def __init__(self, kernel: Lookup) -> None:
        super().__init__()
        self.register_buffer("table", kernel.table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = x if x.dtype == torch.uint8 else x.view(torch.uint8)
        return self.table[index.int()]


class _Norm(nn.Module):
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(self, kernel: Norm) -> None:
        super().__init__()
        self.config = kernel.config
        self.register_buffer("weight", kernel.weight)
        self.register_buffer("bias", kernel.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c = self.config
        scale, eps = c.measured
        value = as_float(x, scale, c.x_zero_point)
        if c.kind == "layer":
            value = F.layer_norm(value, c.size, self.weight, self.bias, eps)
        elif c.kind == "group":
            value = F.group_norm(value, c.size[0], self.weight, self.bias, eps)
        else:
            value = F.instance_norm(value, None, None, self.weight, self.bias, eps=eps)
        return as_integer(value, c.out_scale, c.out_zero_point, x.dtype)


class JoinedNorm(nn.Module):
    """Batch norm of integers; of several tensors: of them along the channels."""

    mean: torch.Tensor
    var: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    slope: torch.Tensor
    shift: torch.Tensor

    def __init__(self, kernel: BatchNorm) -> None:
        super().__init__()
        self.config = kernel.config
        for name in ("mean", "var", "weight", "bias"):
            self.register_buffer(name, getattr(kernel, name))
        slope, shift = kernel.scaled()
        self.register_buffer("slope", slope.reshape(-1, 1))
        self.register_buffer("shift", shift.reshape(-1, 1))

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        c = self.config
        if all(images.is_image(x) for x in parts):
            low = c.out_zero_point if c.relu else 0
            made: torch.Tensor = images.rescaled(list(parts), self.slope, self.shift, low, 255)
            return made
        x = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        value = as_float(x, c.x_scale, c.x_zero_point)
        value = F.batch_norm(value, self.mean, self.var, self.weight, self.bias, eps=c.eps)
        value = value.relu() if c.relu else value
        return as_integer(value, c.out_scale, c.out_zero_point, x.dtype)


def _transposed(kernel: QuantizedWeighted) -> nn.Module | None:
    is_transposed = kernel.config.operator.startswith("conv_transpose")
    has_zero_point = bool(kernel.weight_zero_point.any())
    return TransposedConvolution(kernel) if is_transposed and not has_zero_point else None


_MODULES: dict[type, Callable[[Any], nn.Module | None]] = {
    OnednnConv: _Convolution,
    OnednnConvAdd: _ConvolutionAdd,
    OnednnLinear: _Linear,
    GroupedLinear: lambda kernel: kernel,  # it calls a single operator already
    Lookup: _Lookup,
    Norm: _Norm,
    BatchNorm: JoinedNorm,
    DynamicLinear: dynamic_linear,
    QuantizedWeighted: _transposed,
    **dict.fromkeys(AS_RUN, AsItRuns),
}


def spelled(kernel: KernelModule) -> nn.Module | None:
    """The module that computes the same, ``None`` where there is none.

    >>> from backquant.lower.kernels.lookup import Lookup, LookupConfig
    >>> table = torch.arange(255, -1, -1).byte()
    >>> spelled(Lookup(LookupConfig("reversed"), table))(torch.tensor([5], dtype=torch.uint8))
    tensor([250], dtype=torch.uint8)
    """
    make = _MODULES.get(type(kernel))
    return None if make is None else make(kernel)
