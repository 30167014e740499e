"""Sizes that are written in a graph: an operator that makes tensors of them makes no more than a layer may.

Only numbers that stand in the file are seen. What is computed from sizes of inputs, and what several nodes
multiply, is known at the call: there the limits of the process hold (``docs/artifacts.md``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from backquant.errors import ArtifactError

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
