from __future__ import annotations

import pytest

from backquant.backend_config.checks import number_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.0**-5, "2**-5"),
        (2.0**-4, "0.0625"),
        (3 * 2.0**-12, repr(3 * 2.0**-12)),
        (-(2.0**-12), repr(-(2.0**-12))),
        (5e-324, "2**-1074"),
        (0.0, "0.0"),
        (0, "0"),
        (True, "True"),
    ],
)
def test_number_text(value, text):
    assert number_text(value) == text
    assert eval(text) == value
