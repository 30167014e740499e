"""Names inside of strings."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize(
    ("string", "how"),
    [
        ("torch.ao.quantization.observer.MinMaxObserver", "write 'backquant.MinMaxObserver'"),
        ("torch.nn.intrinsic.ConvReLU2d", "write 'backquant.nn.intrinsic.ConvReLU2d'"),
        ("torch.backends.quantized.engine", "remove it and name the backend"),
    ],
)
def test_a_string_that_is_a_name(migrated: Callable[..., object], string: str, how: str) -> None:
    code = f'import mock\nmock.patch("{string}")\n'
    result = migrated(code)
    assert result.after == code  # type: ignore[attr-defined]
    (finding,) = result.findings  # type: ignore[attr-defined]
    assert (finding.line, finding.kind) == (2, "name in a string")
    assert finding.how.startswith(how)


@pytest.mark.parametrize(
    "code",
    [
        '"""Uses torch.ao.quantization.prepare_fx."""\n',
        'x = "see torch.ao.quantization"\n',
        'x = "torch.nn.Linear quantization"\n',
        "# torch.ao.quantization\n",
    ],
)
def test_prose_is_left_alone(becomes: Callable[..., None], code: str) -> None:
    becomes(code, code)
