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
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from backquant.errors import ArtifactError

# Sizes that are written in a graph: an operator that makes tensors of them makes no more than a layer may.
#
# Only numbers that stand in the file are seen. What is computed from sizes of inputs, and what several nodes
# multiply, is known at the call: there the limits of the process hold (``docs/artifacts.md``).

MOST_SIZE = 1 << 26
_LONGEST = 1 << 16  # of an exponent, a shift, a list that is repeated
_words = re.compile(r"\w+").findall
_FFT = "fft hfft ifft ihfft irfft rfft fft2 fftn ifft2 ifftn irfft2 irfftn rfft2 rfftn"
_WINDOWS = "hann_window hamming_window bartlett_window blackman_window kaiser_window"

#: Where the sizes are among positional arguments, and the words for them.
_PLACES: dict[str, tuple[slice, frozenset[str]]] = {
    name: (slice(*places), frozenset(_words(keywords)))
    for names, places, keywords in (
        ("zeros ones rand randn", (0, None), "size"),
        ("eye", (0, 2), "n m"),
        ("tril_indices triu_indices", (0, 2), "row col"),
        ("full", (0, 1), "size"),
        (f"{_WINDOWS} randperm", (0, 1), "window_length n"),
        ("linspace logspace", (2, 3), "steps"),
        (
            "new_zeros new_ones expand expand_copy broadcast_to repeat tile",
            (1, None),
            "size repeats dims",
        ),
        ("new_full one_hot multinomial", (1, 2), "size num_classes num_samples"),
        ("affine_grid affine_grid_generator", (1, 2), "size"),
        ("normal max_unpool2d max_unpool3d", (2, 3), "size output_size"),
        (f"{_FFT} histc vander tensor_split", (1, 2), "n s bins N sections"),
        ("diag diagflat diag_embed", (1, 2), "offset diagonal"),
    )
    for name in _words(names)
}
_OUTPUTS = re.compile(r"^_?(upsample_\w+\d|adaptive_)")  # of a size that is given


def check_sizes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
    """Raises ``ArtifactError`` where literals ask for more than 67 million positions.

    >>> check_sizes("zeros", ([1024, 1024],), {}, "node z")
    >>> check_sizes("arange", (0, 1, 1e-11), {}, "node a")
    Traceback (most recent call last):
    backquant.errors.ArtifactError: arange makes 100,000,000,000 positions of numbers
      where  node a
    ...
    """
    found = _positions(name, args, kwargs)
    if found > MOST_SIZE:
        raise _refused(f"{name} makes {found:,.0f} positions of numbers", where, MOST_SIZE)


def check_numbers(name: str, args: Sequence[Any], where: str) -> None:
    """The same for ``range``, powers and shifts of integers, and lists that are repeated.

    >>> check_numbers("pow", (3, 1 << 30), "node p")
    Traceback (most recent call last):
    backquant.errors.ArtifactError: pow is called with 1,073,741,824
      where  node p
    ...
    """
    if name == "range":
        check_sizes(name, args, {}, where)
    repeats = name in ("mul", "imul") and any(isinstance(a, (list, tuple, str)) for a in args)
    if repeats or name in ("pow", "ipow", "lshift", "ilshift"):
        most = max((a for a in args[0 if repeats else 1 :] if type(a) is int), default=0)
        if most > _LONGEST:
            raise _refused(f"{name} is called with {most:,}", where, _LONGEST)


def _positions(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    if name in ("arange", "range"):
        return _steps([*args, *(kwargs[key] for key in ("start", "end", "step") if key in kwargs)])
    if name in ("pad", "constant_pad_nd"):
        return _padded(kwargs.get("pad", args[1] if len(args) > 1 else ()))
    places, words = _PLACES.get(name, (slice(0), frozenset()))
    if not words and _OUTPUTS.match(name):
        places, words = slice(1, 2), frozenset({"output_size"})
    if name == "randint":  # two bounds, and a list of sizes
        places, words = slice(0, None), frozenset({"size"})
        args = [given for given in args if isinstance(given, (list, tuple))]
    given = [*args[places], *(kwargs[w] for w in kwargs if w in words)]
    if name.startswith("diag"):  # on either side
        given = [abs(n) for n in given if type(n) is int]
    numbers = list(_integers(given))
    if name == "eye" or name.startswith("diag"):  # of a square
        numbers = (2 * numbers)[:2]
    return math.prod(numbers)


def _integers(value: Any) -> Iterator[float]:
    for each in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(each, (list, tuple)):
            yield from _integers(each)
        elif type(each) is int and each > 1:
            yield float(each)


def _steps(given: Sequence[Any]) -> float:
    """The number of steps of ``arange(end)``, ``arange(start, end)``, ``arange(start, end, step)``."""
    numbers = [n for n in given if type(n) in (int, float)]
    if len(numbers) != len(given) or not numbers:
        return 0.0
    start, end, step = (0, *numbers, 1) if len(numbers) == 1 else (*numbers, 1)[:3]
    span = float(end) - float(start)
    return span / step if step else 0.0


def _padded(pads: Any) -> float:
    """What one position becomes."""
    found = [n for n in pads if type(n) is int] if isinstance(pads, (list, tuple)) else []
    pairs = zip(found[::2], found[1::2], strict=False)
    return math.prod(1.0 + max(0, one) + max(0, two) for one, two in pairs)


def _refused(what: str, where: str, most: int) -> ArtifactError:
    return ArtifactError(
        what,
        where=where,
        fix=f"numbers in a file ask for at most {most:,} at once",
    )


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
