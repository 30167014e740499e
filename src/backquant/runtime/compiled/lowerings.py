"""What Inductor makes of the operators in ``images``: calls of the kernels in ``images.h``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from backquant.errors import EngineError
from backquant.lower.kernels.geometry import Geometry
from backquant.lower.kernels.planned import Weights
from backquant.lower.kernels.self_check import is_right_here
from backquant.lower.kernels.zero_point import plan_padding, rounds_within
from backquant.native import SOURCES
from backquant.native.packing import (
    TAPS,
    Blocks,
    by_channel,
    by_lane,
    choose_blocks,
    choose_tiles,
    pack,
    pack_depthwise,
    pack_spans,
    reads_rows,
    span_rows,
    spans,
    tap_step,
)
from backquant.native.plan import Result, epilogue, has_kernels, has_tiles
from backquant.operators import overload
from backquant.runtime.compiled import images
from backquant.runtime.compiled.images import CHANNELS_LAST, hint, is_known, laid_out, value_of
from backquant.runtime.compiled.inductor import (
    CppTemplate,
    V,
    constant_pad_nd,
    ir,
    lowerings,
    register_lowering,
    view,
)
from backquant.runtime.compiled.operators import convolution, linear, output_size

# A call of one of our kernels as a node of Inductor's graph.
#
# The node's code includes ``kernels.h`` or a header beside it and calls one of its templates with all sizes
# as literals; only the batch may be symbolic. Nothing is fused into it: its epilogue is complete.


HEADER = SOURCES / "kernels.h"
GROUPED = SOURCES / "grouped.h"
IMAGES = SOURCES / "images.h"
TILES = SOURCES / "tiles.h"
ATTENTION = SOURCES / "attention.h"
_LANES = tuple(SOURCES / name for name in ("lanes.h", "lanes_x86.h", "lanes_arm.h"))
_INCLUDED = (*_LANES, HEADER, GROUPED, IMAGES, TILES, ATTENTION)
# the lane count and the order for which weights were packed; see lanes.h
_PACKED_FOR = "static_assert(backquant::LANES == 16 && backquant::ORDER == BACKQUANT_BYTES);"


@dataclass(frozen=True)
class KernelCall:
    """``body``: C++ between the braces; it reads the arguments by name, writes ``out``, and reads the
    number of images (rows of a linear layer) as ``count``. ``header``: what it includes."""

    name: str
    arguments: Mapping[str, Any]
    body: str
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    count: Any
    header: Path = HEADER


@cache
def _digest() -> str:
    """A digest of all headers: code compiled from others must not be found in Inductor's cache."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in _INCLUDED)).hexdigest()[:16]


class _Template(CppTemplate):
    """Renders a ``KernelCall``."""

    def __init__(self, call: KernelCall, nodes: Mapping[str, Any], layout: Any) -> None:
        threads = torch.get_num_threads()
        super().__init__(f"backquant_{call.name}", list(nodes.values()), layout, threads)
        self.call, self.nodes = call, dict(nodes)

    def render(  # type: ignore[override]
        self,
        kernel: Any,
        template_buffer_node: Any = None,
        epilogue_nodes: Any = None,
        **ignored: Any,  # noqa: ARG002 - Inductor's protocol
    ) -> str:
        assert not epilogue_nodes, "nothing can be fused behind a kernel of ours"
        out = self.output_node if template_buffer_node is None else template_buffer_node
        names: dict[str, str] = {}  # the same input may be passed twice
        inputs: dict[str, Any] = {}
        for name, node in self.nodes.items():
            known = names.setdefault(node.get_name(), name)
            if known == name:
                inputs[name] = node
        again = [
            f"const auto* {name} = {names[node.get_name()]};"
            for name, node in self.nodes.items()
            if name not in inputs
        ]
        free = [self.call.count] if hasattr(self.call.count, "free_symbols") else []
        declared = kernel.def_kernel(inputs=inputs, outputs={"out": out}, extra_sizevars=free)
        count = kernel.rename_indexing(self.call.count)
        threads = "#define BACKQUANT_THREADS 1\n" if self.num_threads > 1 else ""
        lines = (
            kernel.maybe_codegen_profile(),
            *again,
            f"const int64_t count = {count};",
            self.call.body,
        )
        body = "\n  ".join(lines)
        return (
            f"// kernels of backquant {_digest()}\n{self.header().getvalue()}\n"
            f'#ifndef BACKQUANT_THREADS\n{threads}#endif\n#include "{self.call.header}"\n{_PACKED_FOR}\n'
            f'extern "C" {declared}\n{{\n  {body}\n}}\n'
        )


def constant(values: torch.Tensor, name: str) -> Any:
    """A tensor that the compiled code carries along. Its name is none of the model's own: PyTorch loads what
    is called like a buffer of the model from that buffer."""
    return V.graph.add_tensor_constant(values.contiguous(), name=f"backquant_kernel_{name}")


def _buffer(value: Any) -> Any:
    while isinstance(value, (ir.TensorBox, ir.StorageBox)):
        value = value.data
    return value.unwrap_view() if isinstance(value, ir.ReinterpretView) else value


def kernel_node(call: KernelCall) -> Any:
    """The result of ``call`` in the graph that Inductor is lowering."""
    nodes = {name: _buffer(value) for name, value in call.arguments.items()}
    layout = ir.FixedLayout(torch.device("cpu"), call.dtype, list(call.size), list(call.stride))
    made = _Template(call, nodes, layout).generate().output_node()
    made.data.data.allow_epilogue_fusion = False
    return made


def _call(name: str, arguments: dict[str, Any], body: str, size: Sequence[Any]) -> Any:
    n, c, h, w = size
    stride = (c * h * w, 1, c * w, c)
    return kernel_node(
        KernelCall(name, arguments, body, (n, c, h, w), stride, torch.uint8, n, IMAGES)
    )


def _lower_image(x: Any, scale: float, zero_point: int) -> Any:
    n, c, h, w = x.get_size()
    if not (has_kernels() and c == 3 and is_known(h, w)):
        quantize = lowerings[torch.ops.quantized_decomposed.quantize_per_tensor.default]
        return quantize(x, scale, zero_point, 0, 255, torch.uint8)
    arguments = {"x": laid_out(x, (0, 1, 2, 3))}
    numbers = f"{1.0 / scale!r}f, {float(zero_point)}f"
    body = f"backquant::quantize3(x, count, {h * w}, {numbers}, out);"
    return _call("image", arguments, body, (n, c, h, w))


def _join(
    parts: Sequence[Any], scale: torch.Tensor, shift: torch.Tensor, low: int, high: int
) -> Any:
    n, _, h, w = parts[0].get_size()
    sizes = [int(x.get_size()[1]) for x in parts]
    arguments = {f"x{i}": laid_out(x, CHANNELS_LAST) for i, x in enumerate(parts)}
    arguments["scale"] = constant(by_channel(scale), "scale")
    arguments["shift"] = constant(by_channel(shift), "shift")
    listed = ", ".join(f"{{x{i}, {size}, {size}}}" for i, size in enumerate(sizes))
    sums = f"{len(sizes)}, {sum(sizes)}, scale, shift, {low}, {high}, count * {h * w}"
    body = f"const backquant::Part parts[] = {{{listed}}};\n  backquant::join(parts, {sums}, out);"
    return _call("join", arguments, body, (n, sum(sizes), h, w))


def _lower_rescaled(parts: Sequence[Any], scale: Any, shift: Any, low: int, high: int) -> Any:
    return _join(parts, value_of(scale).reshape(-1), value_of(shift).reshape(-1), low, high)


def _lower_joined(
    parts: Sequence[Any], scales: Sequence[float], shifts: Sequence[float], low: int, high: int
) -> Any:
    sizes = torch.tensor([int(x.get_size()[1]) for x in parts])
    scale, shift = (torch.tensor(each).repeat_interleave(sizes) for each in (scales, shifts))
    return _join(parts, scale, shift, low, high)


def _lower_gated(x: Any, y: Any, zeros: Sequence[float], scale: float, low: int, high: int) -> Any:
    n, c, h, w = x.get_size()
    arguments = {"x": laid_out(x, CHANNELS_LAST), "y": laid_out(y, CHANNELS_LAST)}
    x_zero, y_zero, zero = zeros
    numbers = f"{float(x_zero)!r}f, {float(y_zero)!r}f, {scale!r}f, {float(zero)!r}f, {low}, {high}"
    body = (
        f"const backquant::Factors f{{{numbers}}};"
        f"\n  backquant::gate(x, y, f, count, {h * w}, {c}, out);"
    )
    return _call("gate", arguments, body, (n, c, h, w))


def _lower_averaged(x: Any) -> Any:
    n, c, h, w = x.get_size()
    body = f"backquant::average(x, count, {h * w}, {c}, out);"
    return _call("average", {"x": laid_out(x, CHANNELS_LAST)}, body, (n, c, 1, 1))


def _lower_shuffled(x: Any) -> Any:
    n, c, h, w = x.get_size()
    half, pixels = int(c) // 2, f"count * {h * w}"
    body = f"backquant::in_turns(x, {c}, x + {half}, {c}, {pixels}, {half}, out);"
    return _call("shuffle", {"x": laid_out(x, CHANNELS_LAST)}, body, (n, c, h, w))


def register_images() -> None:
    """Tell Inductor; once is enough."""
    for operator, lower in (
        (images.image, _lower_image),
        (images.rescaled, _lower_rescaled),
        (images.joined, _lower_joined),
        (images.gated, _lower_gated),
        (images.averaged, _lower_averaged),
        (images.shuffled, _lower_shuffled),
    ):
        register_lowering(operator, type_promotion_kind=None)(lower)


# What Inductor makes of ``backquant::convolution`` and ``backquant::linear``.
#
# Where the CPU has AVX-512 VNNI: a call of our kernels (``kernels.h``; ``tiles.h`` where it has AMX, too).
# Elsewhere, and for convolutions of one or three dimensions or in groups of other than 4, 8 or 16 channels:
# oneDNN's. Weights must be constants of the graph (freezing), and are packed here.

_CTYPES = {torch.uint8: "uint8_t", torch.float32: "float"}


class _Weights(Weights):
    """The constants of one operator, as tensors."""

    @classmethod
    def of(cls, weight: Any, scale: Any, bias: Any) -> _Weights:
        found = [None if item is None else value_of(item) for item in (weight, scale, bias)]
        weight, scale, bias = found
        channels = weight.shape[0]
        scale = scale.reshape(-1).expand(channels) if scale.numel() == 1 else scale.reshape(-1)
        return cls(weight, scale.contiguous(), None if bias is None else bias.reshape(-1))

    def rounds_within(self, x_scale: float, zero_point: int, result: Result) -> bool:
        """Whether an integer result may be computed with that bias."""
        is_float = result.dtype.itemsize > 1
        source = (self.weight, self.scale, x_scale, zero_point)
        return is_float or rounds_within(*source, result.scale)


class Convolution:
    """One convolution while it is lowered; ``lowered`` is what Inductor takes."""

    def __init__(self, x: Any, scale: float, zero_point: int, *rest: Any) -> None:
        self.x, self.x_scale, self.zero_point = x, scale, zero_point
        self.weights = _Weights.of(*rest[:3])
        self.geometry = (list(rest[3]), list(rest[4]), list(rest[5]), int(rest[6]))
        self.other, self.other_scale, self.other_zero_point = rest[7:10]
        self.result = Result(*rest[10:])

    @property
    def depthwise(self) -> bool:
        weight = self.weights.weight
        return self.geometry[3] > 1 and weight.shape[1] == 1 and weight.shape[0] == self.geometry[3]

    def lowered(self) -> Any:
        size = self.x.get_size()
        flat = len(size) == 4 and is_known(*size[1:])
        ours = flat and self.result.has_kernel and self._is_precise
        if ours and self.geometry[3] == 1 and self._adds_plainly() and self._taps() <= TAPS:
            return self._dense()
        if ours and self.depthwise and self.other is None and self._regular():
            return self._depthwise()
        if ours and self._in_spans():
            return self._grouped()
        return self._onednn()

    @property
    def _is_precise(self) -> bool:
        return self.weights.rounds_within(self.x_scale, self.zero_point, self.result)

    def _regular(self) -> bool:
        """A depthwise convolution that the template takes."""
        stride, _, dilation, _ = self.geometry
        height, width = self.weights.weight.shape[2:]
        return stride[0] == stride[1] and dilation == [1, 1] and max(height, width) <= 7

    def _in_spans(self) -> bool:
        """A convolution in groups that the template takes."""
        groups = self.geometry[3]
        shape = self.weights.weight.shape
        known = groups > 1 and spans(shape, groups) and shape[2] * shape[3] <= TAPS
        return known and self.other is None and not self.depthwise

    def _rows(self) -> bool:
        """Whether the taps of one row of the kernel are read as one."""
        return reads_rows(self.weights.weight.shape, self.geometry[2])

    def _taps(self) -> int:
        height, width = self.weights.weight.shape[2:]
        return int(height if self._rows() else height * width)

    def _out(self) -> list[Any]:
        size = self.x.get_size()
        weight = self.weights.weight
        spatial = output_size(size[2:], weight.shape[2:], self.geometry)
        return [size[0], weight.shape[0], *spatial]

    def _adds_plainly(self) -> bool:
        return self.other is None or list(self.other.get_size()) == self._out()

    def _call(self, name: str, arguments: dict[str, Any], body: str, header: Path = HEADER) -> Any:
        n, c, h, w = self._out()
        stride = (c * h * w, 1, c * w, c)
        dtype = self.result.dtype
        return kernel_node(
            KernelCall(name, arguments, body, (n, c, h, w), stride, dtype, n, header)
        )

    def _dense(self) -> Any:
        """Computed as a matrix product of the pixels with the taps."""
        stride, padding, dilation, _ = self.geometry
        channels, deep, height, width = self.weights.weight.shape
        x = self.x
        rows = self._rows()
        taps = self.weights.weight.permute(0, 2, 3, 1)
        taps = taps.reshape(channels, height, -1) if rows else taps.reshape(channels, -1, deep)
        n, _, oh, ow = self._out()
        product = Product.of(taps, hint(n) * oh * ow)
        x = laid_out(x, CHANNELS_LAST)
        _, _, h, w = x.get_size()
        arguments = {"x": x, "weight": constant(product.weight, "weight")}
        found = epilogue(self.result, self.weights, self.x_scale, self.zero_point, by_channel)
        body = found.code
        if self.other is not None:
            arguments["other"] = laid_out(self.other, CHANNELS_LAST)
            found = found.adding(self.other_scale, self.other_zero_point)
            body = found.code
        arguments |= {
            "scale": constant(found.scale, "scale"),
            "shift": constant(found.shift, "shift"),
        }
        arguments["outside"] = self._outside(w * deep)
        kernel = f"{height}, {1 if rows else width}"
        sizes = f"{h}, {w}, {deep}, {oh}, {ow}, {channels}, {taps.shape[2]}"
        steps = (
            f"{stride[0]}, {stride[1]}, {padding[0]}, {padding[1]}, {dilation[0]}, {dilation[1]}"
        )
        ctype = _CTYPES[self.result.dtype]
        body += (
            f"\n  const backquant::Geometry g{{count, {sizes}, {kernel}, {steps}, outside}};"
            f"\n  {product.call(found.activation, self.other is not None, ctype)}"
        )
        return self._call("convolution", arguments, body, product.header)

    def _grouped(self) -> Any:
        """Several groups at a time."""
        channels, deep, height, width = self.weights.weight.shape
        x = laid_out(self.x, CHANNELS_LAST)
        _, _, h, w = x.get_size()
        _, _, oh, ow = self._out()
        found = epilogue(self.result, self.weights, self.x_scale, self.zero_point, by_channel)
        arguments = {
            "x": x,
            "weight": constant(pack_spans(self.weights.weight), "weight"),
            "scale": constant(found.scale, "scale"),
            "shift": constant(found.shift, "shift"),
            "outside": self._outside(w * channels),
        }
        sizes = f"{h}, {w}, {channels}, {oh}, {ow}, {channels}, {deep}, {height}, {width}"
        steps = ", ".join(str(n) for pair in self.geometry[:3] for n in pair)
        tail = (channels - 1) % 16 + 1
        call = f"{span_rows(int(ow), deep)}, {deep}, {tail}, backquant::{found.activation}"
        body = (
            f"{found.code}\n  const backquant::Geometry g{{count, {sizes}, {steps}, outside}};"
            f"\n  backquant::grouped<{call}>(x, weight, g, e, out);"
        )
        return self._call("grouped", arguments, body, GROUPED)

    def _depthwise(self) -> Any:
        stride, padding, _, _ = self.geometry
        channels, _, height, width = self.weights.weight.shape
        x = laid_out(self.x, CHANNELS_LAST)
        _, _, h, w = x.get_size()
        _, _, oh, ow = self._out()
        found = epilogue(self.result, self.weights, self.x_scale, self.zero_point, by_lane)
        arguments = {
            "x": x,
            "weight": constant(pack_depthwise(self.weights.weight[:, 0]), "weight"),
            "scale": constant(found.scale, "scale"),
            "shift": constant(found.shift, "shift"),
            "outside": self._outside(w * channels),
        }
        sizes = f"{h}, {w}, {channels}, {oh}, {ow}, {channels}, 1, {height}, {width}"
        steps = f"{stride[0]}, {stride[1]}, {padding[0]}, {padding[1]}, 1, 1"
        call = f"{height}, {width}, {stride[0]}, backquant::{found.activation}"
        body = (
            f"{found.code}\n  const backquant::Geometry g{{count, {sizes}, {steps}, outside}};"
            f"\n  backquant::Depthwise<{call}, {_CTYPES[self.result.dtype]}>::run(x, weight, g, e, out);"
        )
        return self._call("depthwise", arguments, body)

    def _outside(self, row: Any) -> Any:
        return constant(torch.full((int(row) + 64,), self.zero_point, dtype=torch.uint8), "outside")

    def _onednn(self) -> Any:
        """Computed by oneDNN; generated code adds what is to be added."""
        stride, padding, dilation, groups = self.geometry
        x, weights = self.x, self.weights
        wanted = self.depthwise or not self._is_precise
        summed = wanted and self._is_right_here(self.zero_point)
        folded = plan_padding(tuple(padding), self.zero_point, summed)
        if folded.before is not None:
            both = [n for size in reversed(folded.before) for n in (size, size)]
            x = constant_pad_nd(x, both, self.zero_point)
        geometry = (stride, folded.inside, dilation, groups)
        self._check_here()
        size = [1, weights.weight.shape[1] * groups, *(hint(n) for n in x.get_size()[2:])]
        packed = torch.ops.onednn.qconv_prepack(
            weights.weight, weights.scale, self.x_scale, folded.zero_point, *geometry, size
        )
        result = self.result if self.other is None else self.result.as_floats()
        made = lowerings[torch.ops.onednn.qconv_pointwise.default](
            x,
            self.x_scale,
            folded.zero_point,
            constant(packed, "packed"),
            constant(weights.scale, "scale"),
            constant(torch.zeros(weights.scale.numel(), dtype=torch.int32), "zeros"),
            constant(weights.folded(self.x_scale, folded.folded), "bias"),
            *geometry,
            *result.arguments,
        )
        return made if self.other is None else self._added(made)

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(hint(n) for n in self.x.get_size())

    def _is_right_here(self, zero_point: int = 0) -> bool:
        stride, padding, dilation, groups = self.geometry
        weight = tuple(self.weights.weight.shape)
        geometry = Geometry(weight[2:], tuple(stride), tuple(padding), tuple(dilation))
        return is_right_here(self._shape, weight, geometry, groups, zero_point)

    def _check_here(self) -> None:
        """Refuses what oneDNN computes wrongly on this CPU."""
        if not self._is_right_here():
            raise EngineError(
                f"oneDNN computes a convolution of {list(self._shape)} with "
                f"{list(self.weights.weight.shape)}, stride {list(self.geometry[0])}, wrongly on this CPU",
                where="QuantizedModel.compile",
                fix="call the model as it is, which gathers patches there: quantized(x)",
            )

    def _added(self, made: Any) -> Any:
        quantized = torch.ops.quantized_decomposed
        literals = (0, 255, torch.uint8)
        source = (self.other_scale, self.other_zero_point, *literals)
        other = lowerings[quantized.dequantize_per_tensor.default](self.other, *source)
        total = lowerings[overload("add")](made, other)
        if self.result.post_op == "relu":
            total = lowerings[overload("relu")](total)
        target = (self.result.scale, self.result.zero_point, *literals)
        return lowerings[quantized.quantize_per_tensor.default](total, *target)


def _lower_convolution(*arguments: Any) -> Any:
    return Convolution(*arguments).lowered()


def _lower_linear(x: Any, x_scale: float, zero_point: int, *rest: Any) -> Any:
    weights, result = _Weights.of(*rest[:3]), Result(*rest[3:])
    *lead, deep = x.get_size()
    channels = weights.weight.shape[0]
    rows = view(x, [-1, deep]) if len(lead) != 1 else x
    ours = result.has_kernel and weights.rounds_within(x_scale, zero_point, result)
    made = (_our_linear if ours else _onednn_linear)(rows, (x_scale, zero_point), weights, result)
    return view(made, [*lead, channels]) if len(lead) != 1 else made


def _our_linear(x: Any, source: tuple[float, int], weights: _Weights, result: Result) -> Any:
    rows, deep = x.get_size()
    channels = weights.weight.shape[0]
    product = Product.of(weights.weight.unsqueeze(1), hint(rows))
    found = epilogue(result, weights, *source, by_channel)
    arguments = {
        "x": laid_out(x, (0, 1)),
        "weight": constant(product.weight, "weight"),
        "scale": constant(found.scale, "scale"),
        "shift": constant(found.shift, "shift"),
    }
    body = (
        f"{found.code}\n  const backquant::Geometry g{{1, 1, count, {deep}, 1, count, {channels}, {deep}, "
        f"1, 1, 1, 1, 0, 0, 1, 1, nullptr}};"
        f"\n  {product.call(found.activation, False, _CTYPES[result.dtype])}"
    )
    size, stride = (rows, channels), (channels, 1)
    dtype = result.dtype
    return kernel_node(
        KernelCall("linear", arguments, body, size, stride, dtype, rows, product.header)
    )


def _onednn_linear(x: Any, source: tuple[float, int], weights: _Weights, result: Result) -> Any:
    packed = torch.ops.onednn.qlinear_prepack(weights.weight.contiguous(), None)
    told = 0 if weights.rounds_within(*source, result) else source[1]
    return lowerings[torch.ops.onednn.qlinear_pointwise.default](
        x,
        source[0],
        told,
        constant(packed, "packed"),
        constant(weights.scale, "scale"),
        constant(torch.zeros(weights.scale.numel(), dtype=torch.int32), "zeros"),
        constant(weights.folded(source[0], source[1] - told), "bias"),
        *result.arguments,
    )


def register_lowerings() -> None:
    """Tell Inductor; once is enough."""
    register_lowering(convolution, type_promotion_kind=None)(_lower_convolution)
    register_lowering(linear, type_promotion_kind=None)(_lower_linear)
    register_images()


# Which kernel computes the matrix product of a convolution or linear layer.
#
# ``convolution`` of ``kernels.h``, by vectors, or ``tiled_convolution`` of ``tiles.h``, by AMX.

_FEWEST = 16  # rows of a tile; with fewer rows, vector instructions are as fast as tiles


@dataclass(frozen=True)
class Product:
    """``step``: the integers that one product of tiles adds up; None without AMX."""

    weight: torch.Tensor
    blocks: Blocks
    step: int | None
    threads: int

    @classmethod
    def of(cls, taps: torch.Tensor, pixels: int) -> Product:
        """The product for so many pixels; ``taps``: int8 ``[channels, taps, run]``.

        >>> Product.of(torch.ones(8, 1, 10, dtype=torch.int8), 100).step is None
        True
        """
        channels, count, run = taps.shape
        threads = torch.get_num_threads()
        step = tap_step(count, run, channels) if pixels >= _FEWEST and has_tiles() else None
        blocks = choose_blocks(pixels, channels) if step is None else choose_tiles(channels)
        return cls(pack(taps, blocks), blocks, step, threads)

    @property
    def header(self) -> Path:
        return HEADER if self.step is None else TILES

    def call(self, activation: str, adds: bool, ctype: str) -> str:
        """The call in C++."""
        b = self.blocks
        parts = f"{b.columns}, {b.last}, {b.tail}, backquant::{activation}, {str(adds).lower()}, {ctype}"
        sizes = f"{b.count}, {self.threads}"
        if self.step is None:
            return f"backquant::convolution<{b.rows}, {parts}>(x, weight, g, e, {sizes}, out);"
        return f"backquant::tiled_convolution<{parts}>(x, weight, g, e, {sizes}, {self.step}, out);"
