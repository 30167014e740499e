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


@pytest.mark.parametrize(
    ("imports", "annotation", "kept"),
    [
        ("import torch", "torch.ao.quantization.QConfig", "import torch"),
        ("import torch", "list[torch.ao.quantization.QConfig]", "import torch"),
        (
            "import torch.ao.quantization as tq",
            "tq.qconfig.QConfig | None",
            "import backquant as tq",
        ),
    ],
)
def test_an_annotation_in_quotes(
    migrated: Callable[..., object], imports: str, annotation: str, kept: str
) -> None:
    rest = f'def f(x: "{annotation}"):\n    pass\n'
    result = migrated(f"{imports}\n{rest}")
    assert result.after == f"{kept}\n{rest}"  # type: ignore[attr-defined]
    (finding,) = result.findings  # type: ignore[attr-defined]
    assert (finding.line, finding.kind) == (2, "name in a string")
    assert finding.how == "write 'backquant.QConfig'"


def test_an_annotation_of_an_imported_name_needs_nobody(becomes: Callable[..., None]) -> None:
    becomes(
        """
        from torch.ao.quantization import QConfig
        import torch.ao.quantization as tq
        def f(x: "QConfig", y: "list[QConfig.x]", z: "tq.QConfig"): ...
        """,
        """
        from backquant import QConfig
        import backquant as tq
        def f(x: "QConfig", y: "list[QConfig.x]", z: "tq.QConfig"): ...
        """,
    )
