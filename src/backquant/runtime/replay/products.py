"""Products of floats that a recording quantizes at once.

An image times one number a channel, as a gate of a squeeze-and-excitation block is, and of which only
integers are read: the library of kernels has an operator for both, which writes no floats. Its integers are
those of the two operators.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from backquant.native.library import is_here
from backquant.operators import overload
from backquant.runtime.replay.record import Call, Layout, Recording, Ref
from backquant.runtime.replay.rewriting import Rewriting, is_dense


def quantize_products(recording: Recording) -> Recording:
    """``recording`` with one call for each such product. Cost: linear."""
    if not is_here():
        return recording
    run, made = torch.ops.backquant_kernels, Rewriting(recording)
    for place, call in enumerate(recording.calls):
        if call.operator is not run.quantized.default:
            continue
        product = made.made_for(call.arguments[0])
        factors = None if product is None else _factors(recording, recording.calls[product])
        if product is not None and factors is not None:
            # where the product was: what it reads may be changed in place behind it
            arguments = (*factors, *call.arguments[1:])
            made.calls[product] = replace(
                call, operator=run.quantized_product.default, arguments=arguments
            )
            made.calls[place] = None
    return made.finish()


def _factors(recording: Recording, call: Call) -> tuple[Ref, Ref] | None:
    """An image and one number for each of its channels, which ``call`` multiplies."""
    if call.operator is not overload("mul"):
        return None
    one, other = call.arguments
    if not isinstance(one, Ref) or not isinstance(other, Ref):
        return None
    layouts = recording.layouts
    for image, gate in ((one, other), (other, one)):
        if _is_gate(layouts[image.name], layouts[gate.name]):
            return image, gate
    return None


def _is_gate(image: Layout, gate: Layout) -> bool:
    if image.dtype is not torch.float32 or gate.dtype is not torch.float32 or len(image.size) != 4:
        return False
    n, c, h, w = image.size
    is_last = is_dense(image, (n, h, w, c), (0, 2, 3, 1)) and h * w > 1
    return is_last and gate.size == (n, c, 1, 1) and is_dense(gate, gate.size, (0, 1, 2, 3))
