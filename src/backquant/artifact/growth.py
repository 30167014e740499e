"""How much larger a layer of a file may make its input: what a call costs is bounded by inputs and weights.

Operators of windows and of sizes compute as many positions as the numbers beside them say, whatever the
weights. A file of a few kilobytes whose stride became 65,536 would compute for minutes. So the positions that
come of one position of the input are bounded, and the sizes that are written out:

1. Transposed convolutions: along each axis stride, output padding and what the dilated window adds.
2. Other windows: along each axis the padding on both sides, for each step of the stride.
3. Resizing by a factor: the product of the factors. To a size, and padding: the product of the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from backquant.artifact.sizes import MOST_SIZE
from backquant.errors import ArtifactError

MOST_POSITIONS = 1 << 14
_ANY = 1 << 62  # larger numbers count as this one
_CALLS = {
    "convolution": ("stride", "padding", "dilation", "transposed", "output_padding", "groups"),
    "conv_transpose": ("stride", "padding", "output_padding", "groups", "dilation"),
    "conv": ("stride", "padding", "dilation", "groups"),
}
RESIZES = frozenset({"interpolate", "upsample", "upsample_nearest", "upsample_bilinear"})


def check_growth(
    kind: str, values: Mapping[str, Any], kernel: Sequence[int] | None, where: str
) -> None:
    """The numbers of a layer called ``kind``, whose window has the sizes ``kernel`` (``None``: not known).

    Raises ``ArtifactError`` where one position of the input becomes more than 16,384, or more than four for
    each tap of the window.

    >>> check_growth("ConvTranspose2d", {"stride": (32, 32)}, (32, 32), "up")
    >>> check_growth("ConvTranspose1d", {"stride": (65536,)}, (2,), "up")
    Traceback (most recent call last):
    backquant.errors.ArtifactError: ConvTranspose1d makes 65,536 positions of one
      where  up
    ...
    """
    is_transposed = "transpose" in kind.lower() or bool(values.get("transposed"))
    taps = math.prod(kernel) if kernel else 1
    found = 1.0
    if "stride" in values and (is_transposed or "padding" in values):
        given = [values.get(name) for name in ("stride", "padding", "dilation", "output_padding")]
        axes = max(len(kernel or ()), *(len(v) for v in given if isinstance(v, (list, tuple))), 1)
        window = list(kernel) if kernel and len(kernel) == axes else [2] * axes
        found = math.prod(float(_along(values, i, window[i], is_transposed)) for i in range(axes))
    elif "scale_factor" in values:
        found = _product(values["scale_factor"])
    sizes = [_product(values.get(name)) for name in ("output_size", "size", "padding")]
    if found > max(MOST_POSITIONS, 4 * taps) or (kernel is None and max(sizes) > MOST_SIZE):
        much = f"{found:,.0f} positions of one" if found > MOST_POSITIONS else f"{max(sizes):,.0f}"
        raise ArtifactError(
            f"{kind} makes {much}",
            where=where,
            fix=f"a layer of a file makes at most {MOST_POSITIONS:,} positions of one, or four for each "
            "number of its window: put resizing by more outside of the model",
        )


def check_call_growth(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], where: str
) -> None:
    """The same for a call of a convolution, whose weight is computed or read elsewhere, and of resizing."""
    if name in RESIZES:
        values = {**dict(zip(("size", "scale_factor"), args[1:], strict=False)), **kwargs}
        values["scale_factor"] = _each(values.get("scale_factor"), 2)  # of images, where it is one
        check_growth(name, values, None, where)
        return
    kind = next((kind for kind in _CALLS if kind in name), "")
    if kind:
        names = _CALLS[kind]
        values = {**dict(zip(names, args[3:], strict=False)), **kwargs}
        dims = next((int(letter) for letter in name if letter.isdigit()), 1)
        values["stride"] = _each(values.get("stride", 1), dims)
        check_growth(name, values, None, where)


def _each(value: Any, dims: int) -> Any:
    return [value] * dims if type(value) in (int, float) else value


def _number(value: Any, axis: int, default: int) -> int:
    if isinstance(value, (list, tuple)):
        value = value[min(axis, len(value) - 1)] if value else default
    return max(-_ANY, min(value, _ANY)) if type(value) is int else default


def _along(values: Mapping[str, Any], axis: int, window: int, is_transposed: bool) -> int:
    """Positions that come of one, along an axis."""
    stride = _number(values.get("stride"), axis, 1)
    if is_transposed:
        dilation = _number(values.get("dilation"), axis, 1)
        more = _number(values.get("output_padding"), axis, 0)
        return max(stride, dilation * (window - 1) + 1) + more
    return 1 + 2 * _number(values.get("padding"), axis, 0) // max(stride, 1)


def _product(value: Any) -> float:
    found = value if isinstance(value, (list, tuple)) else [value]
    return math.prod(float(min(abs(v), _ANY)) for v in found if type(v) in (int, float) and v)
