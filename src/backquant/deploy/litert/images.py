"""Images as kernels read them: batch, height, width, channels; lines are images of height 1."""

from __future__ import annotations

from typing import Any

from backquant.deploy.litert.call import Call
from backquant.deploy.litert.layouts import CHANNELS_LAST
from backquant.deploy.litert.lowered_values import UnsupportedError, Value
from backquant.deploy.litert.network import Tensor

__all__ = ["activation", "from_image", "image", "image_output", "pair"]

_LINES = (0, 2, 1)
_ACTIVATIONS = {"NONE": 0, "RELU": 1, "RELU_N1_TO_1": 2, "RELU6": 3}


def activation(call: Call) -> int:
    """The clamp of a kernel, by the schema's number."""
    return _ACTIVATIONS[call.activation]


def pair(value: Any, rank: int, of_lines: int = 1) -> tuple[int, int]:
    """One or two numbers as those of height and width; ``of_lines``: that of the height of a line.

    >>> pair([2], 4), pair([2], 3), pair(3, 3, of_lines=0)
    ((2, 2), (1, 2), (0, 3))
    """
    numbers = [value] if isinstance(value, int) else list(value)
    if rank == 3:
        return of_lines, int(numbers[-1])
    return int(numbers[0]), int(numbers[-1])


def image(call: Call, value: Value) -> Tensor:
    """A value of three or four axes with its channels last."""
    rank = len(value.shape)
    if rank == 4:
        return call.emitter.laid(value, CHANNELS_LAST)
    if rank != 3:
        raise UnsupportedError(f"images of {rank} axes")
    lines = call.emitter.laid(value, _LINES)
    shape, signature = lines.shape, lines.signature
    return call.emitter.reshape(lines, (shape[0], 1, *shape[1:]), (signature[0], 1, *signature[1:]))


def from_image(call: Call, tensor: Tensor, rank: int) -> Value:
    """The inverse of ``image``."""
    if rank == 4:
        return Value(tensor, CHANNELS_LAST)
    shape, signature = tensor.shape, tensor.signature
    lines = call.emitter.reshape(tensor, (shape[0], *shape[2:]), (signature[0], *signature[2:]))
    return Value(lines, _LINES)


def image_output(call: Call) -> Tensor:
    """A tensor for the result of a kernel of images."""
    if len(call.shape) == 4:
        return call.output(CHANNELS_LAST)
    made = call.output(_LINES)
    made.shape = (made.shape[0], 1, *made.shape[1:])
    made.signature = (made.signature[0], 1, *made.signature[1:])
    return made
