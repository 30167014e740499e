"""What Inductor makes of the operators in ``images``: calls of the kernels in ``images.h``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from backquant.native.epilogue import has_kernels
from backquant.native.packing import by_channel
from backquant.runtime.compiled import images
from backquant.runtime.compiled.images import CHANNELS_LAST, is_known, laid_out, value_of
from backquant.runtime.compiled.inductor import lowerings, register_lowering
from backquant.runtime.compiled.template import IMAGES, KernelCall, constant, kernel_node


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
