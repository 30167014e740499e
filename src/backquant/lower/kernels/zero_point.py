"""Taking the zero point of the input out of a convolution or linear layer.

``sum((x - z) * w) * s + b`` is ``sum(x * w) * s + (b - z * sum(w) * s)``: with the second form oneDNN
need not sum the weight at every call, which for a 3×3 convolution of 512 channels on 7×7 takes longer
than the convolution. Padding stands for the value 0, that is for the integer ``z``; so the input is
padded with ``z`` beforehand. Where the weight is small (all depthwise ones are) the sums take less time
than the padding, and oneDNN gets zero point and padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from backquant.native.packing import row_sums

# Summing a weight of this many elements takes 10 µs, as long as padding a small image.
_SMALL = 1 << 17
# A bias of 1/256 of the shift is 2**16 times the rounding error of the shift in float32 (24 bits).
_COVERS = 256
_ROUNDING = 2.0**-23  # of the shift, and of the bias with it


@dataclass(frozen=True)
class Padding:
    """Who pads. ``before``: what ``pad_with`` adds (None: nothing). ``inside`` and ``zero_point``: what
    the kernel is told. ``folded``: the part of the zero point that the bias makes up for."""

    before: tuple[int, ...] | None
    inside: list[int]
    zero_point: int
    folded: int


def has_short_sums(weight: torch.Tensor, groups: int) -> bool:
    """Whether summing the weight ``[out, in / groups, ...]`` at every call is cheap.

    >>> has_short_sums(torch.ones(960, 1, 5, 5), 960), has_short_sums(torch.ones(512, 512, 3, 3), 1)
    (True, False)
    """
    return weight.numel() <= _SMALL or (groups > 1 and weight.shape[1] == 1)


def plan_padding(padding: tuple[int, ...], zero_point: int, summed: bool) -> Padding:
    """Whether we or the kernel pad the input of a convolution. ``summed``: the kernel may sum the weight
    at every call.

    >>> plan_padding((1, 1), 7, summed=False)
    Padding(before=(1, 1), inside=[0, 0], zero_point=0, folded=7)
    >>> plan_padding((1, 1), 7, summed=True)
    Padding(before=None, inside=[1, 1], zero_point=7, folded=0)
    """
    if zero_point and summed:
        return Padding(None, list(padding), zero_point, 0)
    if not zero_point or not any(padding):
        return Padding(None, list(padding), 0, zero_point)
    return Padding(padding, [0] * len(padding), 0, zero_point)


def fold_zero_point(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: float,
    x_zero_point: int,
) -> torch.Tensor | None:
    """The bias that makes up for reading the input with zero point 0.

    ``weight``: int8 ``[out, ...]``; ``weight_scale``: float32, one entry or ``[out]``; ``bias``: float32
    ``[out]`` or None. The shift is rounded as the kernel rounds a product, so that where the input is 0 and
    there is no bias, exactly 0 comes out: a normalisation behind it would blow up what is left over.

    >>> weight = torch.ones(1, 2, dtype=torch.int8)
    >>> fold_zero_point(weight, torch.ones(1), torch.tensor([3.0]), 0.5, 10)
    tensor([-7.])
    """
    if x_zero_point == 0:
        return bias
    product = x_zero_point * row_sums(weight)
    shift = product.float() * (torch.tensor(x_scale, dtype=torch.float32) * weight_scale.float())
    return -shift if bias is None else (bias.double() - shift.double()).float()


def covers_rounding(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: float,
    x_zero_point: int,
) -> bool:
    """Whether ``bias`` is so large that what rounding leaves of the folded zero point, 1e-7 of it, is nothing
    beside it, so that the bias may be folded where oneDNN does not give exactly 0 for zeros
    (``self_check.folds_zero_exactly``). Arguments as in ``fold_zero_point``.

    >>> weight = torch.ones(1, 2, dtype=torch.int8)
    >>> arguments = weight, torch.ones(1)
    >>> [covers_rounding(*arguments, b, 0.5, 10) for b in (torch.tensor([3.0]), torch.zeros(1), None)]
    [True, False, False]
    """
    shift = fold_zero_point(weight, weight_scale, None, x_scale, x_zero_point)
    if shift is None:
        return True
    return bias is not None and bool(bias.abs().amax() * _COVERS >= shift.abs().amax())


def rounds_within(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: float,
    x_zero_point: int,
    out_scale: float,
) -> bool:
    """Whether rounding the folded zero point in float32 moves a result by less than a quarter of its step.

    Not where one step of the products is thousands of steps of the result, as behind one huge channel:
    the bias is lost beside the zero point then. The kernel is told it instead, and sums it in integers.
    Arguments as in ``fold_zero_point``.

    >>> weight, scale = torch.ones(1, 2, dtype=torch.int8), torch.ones(1)
    >>> rounds_within(weight, scale, 0.5, 10, 0.1), rounds_within(weight, scale, 15_000.0, 127, 0.018)
    (True, False)
    """
    shift = fold_zero_point(weight, weight_scale, None, x_scale, x_zero_point)
    return shift is None or bool(shift.abs().amax() * _ROUNDING <= 0.25 * out_scale)


def pad_with(x: torch.Tensor, padding: tuple[int, ...], value: int) -> torch.Tensor:
    """``x`` ``[batch, channels, ...]`` with ``padding[i]`` integers ``value`` on both sides of each
    spatial dimension; the memory format is kept.

    >>> pad_with(torch.ones(1, 1, 1, 1, dtype=torch.uint8), (0, 1), 7)
    tensor([[[[7, 1, 7]]]], dtype=torch.uint8)
    """
    both = [n for size in reversed(padding) for n in (size, size)]
    return F.pad(x, both, value=value)
