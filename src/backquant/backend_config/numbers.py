"""Numbers as people write them."""

from __future__ import annotations

import math
from typing import Any

_SMALL = 2.0**-4


def number_text(value: Any) -> str:
    """``2**-12`` for small powers of two (scales), else the usual ``repr``.

    >>> number_text(2.0**-12), number_text(1 / 256), number_text(-127), number_text(0.1)
    ('2**-12', '2**-8', '-127', '0.1')
    """
    if isinstance(value, float) and 0 < value < _SMALL:
        mantissa, exponent = math.frexp(value)
        if mantissa == 0.5:
            return f"2**{exponent - 1}"
    return repr(value)


def short_text(value: float) -> str:
    """The number with six digits, for measured values.

    >>> short_text(2.0**-12), short_text(1 / 3), short_text(127)
    ('2**-12', '0.333333', '127')
    """
    text = number_text(value)
    return text if text.startswith("2**") or not isinstance(value, float) else f"{value:g}"
