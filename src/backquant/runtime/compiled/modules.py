"""The kernel modules of a lowered graph in operators that can be compiled.

``spelled`` gives the module that takes a kernel module's place; the integers of weights are shared with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from backquant.errors import EngineError
from backquant.graph import copied_graph, get_module, set_module
from backquant.graph.dialect_ops import register_quantized_decomposed
from backquant.lower.kernels.boundary import quantize
from backquant.lower.kernels.configured import KernelModule
from backquant.lower.kernels.conv import OnednnConv
from backquant.lower.kernels.conv_add import OnednnConvAdd
from backquant.lower.kernels.grouped import GroupedLinear
from backquant.lower.kernels.integer.lookup_tables import IntegerTable
from backquant.lower.kernels.linear import OnednnLinear
from backquant.lower.kernels.linear_dynamic import DynamicLinear, activated
from backquant.lower.kernels.lookup import Lookup
from backquant.lower.kernels.norm import BatchNorm, Norm
from backquant.lower.kernels.packed import PackedKernel
from backquant.lower.kernels.postop import PostOp
from backquant.lower.kernels.quantized import QuantizedWeighted
from backquant.runtime.compiled import images, operators
from backquant.runtime.compiled.as_run import AS_RUN, AsItRuns
from backquant.runtime.compiled.functions import INPUT, SPELLINGS, as_float, as_integer
from backquant.runtime.compiled.operators import NARROW

# Transposed convolutions as convolutions: each of ``stride`` neighbours in the result is a channel, made of
# the taps that reach it, and the channels are laid side by side. No product with an inserted zero is
# computed.
#
# Position ``s·m + r`` of the result reads input ``m - q`` by tap ``k``, where ``d·k = s·q + r`` (stride
# ``s``, dilation ``d``).


class TransposedConvolution(nn.Module):
    """``QuantizedWeighted`` for a transposed convolution.

    >>> from backquant.lower.kernels.packed import WeightTensors
    >>> from backquant.lower.kernels.quantized import QuantizedConfig
    >>> config = QuantizedConfig("conv_transpose1d", "fbgemm", 1.0, 0, 1.0, 0, (2,), (0,), (1,), (0,))
    >>> weight = torch.tensor([[[1, 2, 3]]], dtype=torch.int8)
    >>> tensors = WeightTensors(weight, torch.ones(1), torch.zeros(1, dtype=torch.int64), None)
    >>> made = TransposedConvolution(QuantizedWeighted(config, tensors))
    >>> made(torch.tensor([[[1, 10]]], dtype=torch.uint8))
    tensor([[[ 1,  2, 13, 20, 30]]], dtype=torch.uint8)
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, kernel: QuantizedWeighted) -> None:
        super().__init__()
        self.config = c = kernel.config
        size = tuple(kernel.weight.shape[2:])
        geometry = zip(size, c.stride, c.dilation, c.padding, c.output_padding, strict=True)
        self._kernel_size = size
        self.taps = [_taps(*numbers) for numbers in geometry]
        weight = _by_output(kernel.weight, c.groups)
        copies = math.prod(c.stride)
        channels = weight.shape[0]
        self.register_buffer("weight", _spread(weight, self.taps, c.stride, c.dilation))
        scale = kernel.weight_scale.reshape(-1, 1).expand(channels, copies)
        self.register_buffer("scale", scale.reshape(-1, 1).clone())
        bias = kernel.bias
        spread = None if bias is None else bias.reshape(-1, 1).expand(channels, copies)
        self.register_buffer("bias", None if spread is None else spread.reshape(-1, 1).clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c = self.config
        ones, padding = [1] * len(c.stride), [count - 1 for count in self.taps]
        post_op = "relu" if c.operator.endswith("_relu") else "none"
        made = operators.convolution(
            *(x, c.x_scale, c.x_zero_point, self.weight, self.scale, self.bias),
            *(ones, padding, ones, c.groups, None, 1.0, 0),
            *(c.out_scale, c.out_zero_point, torch.uint8, post_op, [], ""),
        )
        return self._side_by_side(made, x.shape[2:])

    def _side_by_side(self, made: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
        """``[batch, channels · strides, ...]`` as ``[batch, channels, ...]`` of the size of the result."""
        c, dims = self.config, len(self.config.stride)
        blocks = made.reshape(made.shape[0], -1, *c.stride, *made.shape[2:])
        order = [axis for i in range(dims) for axis in (2 + dims + i, 2 + i)]
        whole = [n * s for n, s in zip(made.shape[2:], c.stride, strict=True)]
        result = blocks.permute(0, 1, *order).reshape(made.shape[0], blocks.shape[1], *whole)
        for axis, n in enumerate(size):
            kernel = self._kernel_size[axis]
            span = (n - 1) * c.stride[axis] + c.dilation[axis] * (kernel - 1) + 1
            length = span - 2 * c.padding[axis] + c.output_padding[axis]
            result = result.narrow(axis + 2, c.padding[axis], length)
        return result


def _taps(kernel: int, stride: int, dilation: int, padding: int, output_padding: int) -> int:
    """Over how many inputs the convolution reaches: those that a tap reads, and enough for the result."""
    last = dilation * (kernel - 1)
    beyond = last + 1 + output_padding - padding - stride * (1 + last // stride)
    return 1 + last // stride + max(0, math.ceil(beyond / stride))


def _by_output(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """``[in, out / groups, ...]`` as ``[out, in / groups, ...]``."""
    parts = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2)
    return parts.reshape(-1, *parts.shape[2:])


def _spread(
    weight: torch.Tensor, taps: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> torch.Tensor:
    """``[out, in / groups, ...]`` as ``[out · strides, in / groups, *taps]``, the last input first."""
    made = weight.new_zeros(weight.shape[0], *stride, weight.shape[1], *taps)
    for tap in itertools.product(*(range(n) for n in weight.shape[2:])):
        at = [divmod(k * d, s) for k, d, s in zip(tap, dilation, stride, strict=True)]
        left = [n - 1 - q for n, (q, _) in zip(taps, at, strict=True)]
        copy: tuple[Any, ...] = (slice(None), *(r for _, r in at), slice(None), *left)
        taken: tuple[Any, ...] = (slice(None), slice(None), *tap)
        made[copy] = weight[taken]
    return made.reshape(-1, weight.shape[1], *taps)


# Linear layers that are quantized at each call, or hold float16 weights: what a call measures is computed by
# generated code, the products are the kernel of a static linear layer.

_LEAST_SCALE = 2.0**-126  # the scale where all values are 0


class DynamicProduct(nn.Module):
    """``DynamicLinear`` with int8 weights: exact sums of the integers, from which those of the zero point are
    taken afterwards, since it is known at the call alone."""

    weight: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, kernel: DynamicLinear) -> None:
        super().__init__()
        self.config = kernel.config
        rows = kernel.weight.shape[0]
        self.register_buffer("weight", kernel.weight)
        scale = kernel.weight_scale.float().reshape(-1).expand(rows).clone()
        self.register_buffer("scale", scale.reshape(-1, 1))
        self.register_buffer("shift", kernel.weight.sum(1, dtype=torch.int64).float() * scale)
        self.register_buffer("bias", kernel.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top = 127 if self.config.reduce_range else 255
        value = x.float()
        least, most = value.amin().clamp(max=0.0), value.amax().clamp(min=0.0)
        scale = ((most - least) / top).clamp(min=_LEAST_SCALE)
        zero_point = (-least / scale).round().clamp(0, top)
        integers = (value / scale + zero_point).round().clamp(0, top).to(torch.uint8)
        plain: tuple[Any, ...] = (1.0, 0, torch.float32, "none", [], "")
        sums = operators.linear(integers, 1.0, 0, self.weight, self.scale, None, *plain)
        made = (sums - zero_point * self.shift) * scale
        made = made if self.bias is None else made + self.bias
        return activated(self.config, made).to(x.dtype)


class HalfWeights(nn.Module):
    """``DynamicLinear`` with float16 weights: products in float32."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, kernel: DynamicLinear) -> None:
        super().__init__()
        self.config = kernel.config
        self.register_buffer("weight", kernel.weight)
        self.register_buffer("bias", kernel.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = F.linear(x.float(), self.weight.float(), self.bias)
        return activated(self.config, made).to(x.dtype)


def dynamic_linear(kernel: DynamicLinear) -> nn.Module | None:
    """What takes the place of ``kernel``; ``None`` for weights with zero points.

    >>> from backquant.lower.kernels.linear_dynamic import DynamicLinearConfig
    >>> one = torch.ones(1, 2, dtype=torch.int8)
    >>> tensors = {"weight": one, "weight_scale": torch.ones(1),
    ...            "weight_zero_point": torch.zeros(1, dtype=torch.int64)}
    >>> kernel = DynamicLinear(DynamicLinearConfig("fbgemm", torch.int8), tensors)
    >>> dynamic_linear(kernel)(torch.tensor([[0.0, 255.0]]))
    tensor([[255.]])
    """
    if kernel.config.weight_dtype == torch.float16:
        return HalfWeights(kernel)
    return None if bool(kernel.weight_zero_point.any()) else DynamicProduct(kernel)


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
    IntegerTable: lambda kernel: kernel,  # operators of torch, which become code
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


# From a lowered graph to one that can be compiled: the same nodes, kernels spelled anew.

_KERNELS = "backquant.lower.kernels."


def compilable(lowered: fx.GraphModule, float_dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    """A graph module with a graph of its own that shares weights with ``lowered``, which is not changed.

    ``float_dtype``: bfloat16 for attention and products of activations in it.

    Raises ``EngineError`` with the kernels that there is no spelling for.

    >>> from torch import nn
    >>> compilable(fx.symbolic_trace(nn.Sequential(nn.ReLU()))).graph.find_nodes(op="call_module")
    [_0]
    """
    register_quantized_decomposed()
    spellings = SPELLINGS if float_dtype == torch.float32 else {**SPELLINGS, **NARROW}
    made = fx.GraphModule(lowered, copied_graph(lowered.graph))
    _read_parts(made)
    missing: list[str] = []
    done: set[str] = set()
    for node in made.graph.nodes:
        if node.op == "call_module" and node.target not in done:
            done.add(node.target)
            kernel = get_module(made, str(node.target))
            if isinstance(kernel, KernelModule):
                module = spelled(kernel)
                if module is None:
                    missing.append(f"{node.name} ({kernel.name})")
                else:
                    set_module(made, str(node.target), module)
        elif node.op == "call_function" and node.target in spellings:
            node.target = INPUT if _is_input(node) else spellings[node.target]
        elif getattr(node.target, "__module__", "").startswith(_KERNELS):
            missing.append(f"{node.name} ({node.target.__name__})")
    if missing:
        raise EngineError(
            f"{len(missing)} kernels cannot be compiled: {', '.join(missing[:5])}",
            where="QuantizedModel.compile",
            fix="call the model as it is: quantized(x); it runs on the same integers",
        )
    made.recompile()
    return made


def _read_parts(graph_module: fx.GraphModule) -> None:
    """Batch norms that alone read what is joined read its parts."""
    for node in graph_module.graph.find_nodes(op="call_function", target=torch.cat):
        user = next(iter(node.users), None)
        if len(node.users) != 1 or user is None or user.op != "call_module":
            continue
        norm = get_module(graph_module, str(user.target))
        along_channels = len(node.args) == 2 and node.args[1] == 1
        if isinstance(norm, BatchNorm) and norm.config.dims == 2 and along_channels:
            user.args = tuple(node.args[0])
            graph_module.graph.erase_node(node)


def _is_input(node: fx.Node) -> bool:
    """Whether a node quantizes an input of the model, to all 256 integers."""
    source = node.args[0]
    full_range = node.target is quantize and tuple(node.args[3:]) == (0, 255, torch.uint8)
    return full_range and isinstance(source, fx.Node) and source.op == "placeholder"
