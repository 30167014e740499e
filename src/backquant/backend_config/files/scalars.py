"""Dtypes, schemes and numbers as a file writes them."""

from __future__ import annotations

import math
from typing import Any

import torch

from backquant.backend_config.files.names import SpellingError
from backquant.backend_config.files.problems import suggestion
from backquant.backend_config.numbers import number_text
from backquant.errors import quoted


def dtype_from(text: str) -> torch.dtype:
    """The dtype of that name, with or without the prefix. Raises SpellingError.

    >>> dtype_from("quint8"), dtype_from("torch.float")
    (torch.quint8, torch.float32)
    >>> dtype_from("qint9")  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    SpellingError: unknown dtype "qint9"; did you mean "qint8"?
    """
    found: torch.dtype = _constant(text, torch.dtype, "dtype")
    return found


def qscheme_from(text: str) -> torch.qscheme:
    """The qscheme of that name, with or without the prefix. Raises SpellingError.

    >>> qscheme_from("per_channel_symmetric")
    torch.per_channel_symmetric
    """
    found: torch.qscheme = _constant(text, torch.qscheme, "qscheme")
    return found


def _constant(text: str, kind: Any, what: str) -> Any:
    name = text.removeprefix("torch.")
    value = getattr(torch, name, None)
    if isinstance(value, kind):
        return value
    known = [word for word, item in vars(torch).items() if isinstance(item, kind)]
    raise SpellingError(f"unknown {what} {quoted(text)}", suggestion(name, sorted(known)))


def number_data(value: Any) -> Any:
    """A number as it is, except that small powers of two become readable text.

    Raises SpellingError for what is no finite number: JSON cannot carry it.

    >>> number_data(2.0**-12), number_data(0.0078), number_data(-127)
    ('2**-12', 0.0078, -127)
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise SpellingError(f"{value} is not a finite number", "leave the bound out (None)")
    text = number_text(value)
    return text if text.startswith("2**") else value


def number_from(value: Any) -> Any:
    """The number that ``number_data`` wrote.

    >>> number_from("2**-12") == 2.0**-12, number_from(3)
    (True, 3)
    """
    if not isinstance(value, str):
        return value
    exponent = int(value.removeprefix("2**"))
    if not -1074 <= exponent <= 1023:
        raise SpellingError(f"{value} is outside of the range of a float")
    return math.ldexp(1.0, exponent)
