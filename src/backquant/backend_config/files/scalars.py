"""Dtypes, schemes and numbers as a file writes them."""

from __future__ import annotations

import math
from typing import Any

import torch

from backquant.backend_config.files.import_paths import SpellingError
from backquant.backend_config.files.problems import suggestion
from backquant.backend_config.numbers import number_text
from backquant.errors import quoted


def constant_from(text: str, kind: Any) -> Any:
    """The dtype, or the qscheme, of that name, with or without the prefix. Raises SpellingError.

    >>> constant_from("quint8", torch.dtype), constant_from("torch.float", torch.dtype)
    (torch.quint8, torch.float32)
    >>> constant_from("qint9", torch.dtype)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    SpellingError: unknown dtype "qint9"; did you mean "qint8"?
    """
    name = text.removeprefix("torch.")
    value = getattr(torch, name, None)
    if isinstance(value, kind):
        return value
    known = [word for word, item in vars(torch).items() if isinstance(item, kind)]
    message = f"unknown {kind.__name__} {quoted(text)}"
    raise SpellingError(message, suggestion(name, sorted(known)))


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
