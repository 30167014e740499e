"""Patterns that look like those of PyTorch 1.13."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst
import pytest

from backquant.migrate.patterns import looks_reversed


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("(nn.ReLU, nn.Conv2d)", True),
        ("(F.relu, F.linear)", True),
        ("(nn.ReLU, (nn.BatchNorm2d, nn.Conv2d))", True),
        ("(torch.add, MatchAllNode, (nn.BatchNorm2d, nn.Conv2d))", True),
        ("(nn.BatchNorm2d, nn.Conv2d)", True),
        ("(nn.Conv2d, nn.ReLU)", False),
        ("(nn.Conv2d, nn.BatchNorm2d, nn.ReLU)", False),
        ("(nn.BatchNorm2d, nn.ReLU)", False),
        ("(operator.add, torch.relu)", False),
        ("nn.ReLU", False),
        ("(nn.ReLU,)", False),
        ("(mine, other)", False),
    ],
)
def test_which_look_reversed(pattern: str, expected: bool) -> None:
    assert looks_reversed(cst.parse_expression(pattern)) is expected


def test_patterns_of_pytorch_are_not_suspected() -> None:
    """No forward pattern of PyTorch's own backends looks reversed."""
    from torch.ao.quantization.backend_config import get_native_backend_config
    from torch.ao.quantization.backend_config.x86 import get_x86_backend_config

    suspected = [
        pattern.pattern
        for backend in (get_native_backend_config(), get_x86_backend_config())
        for pattern in backend.configs
        if isinstance(pattern.pattern, tuple)
        and looks_reversed(
            cst.parse_expression("(" + "".join(f"m.{op.__name__}," for op in pattern.pattern) + ")")
        )
    ]
    assert suspected == []


@pytest.mark.parametrize(
    "use",
    [
        "b.BackendPatternConfig((R.ReLU, R.Conv2d))",
        'b.BackendPatternConfig.from_dict({"pattern": (R.ReLU, R.Conv2d)})',
        'b.BackendConfig.from_dict({"name": "", "configs": [{"pattern": (R.ReLU, R.Conv2d)}]})',
        'd = {"configs": [{"pattern": (R.ReLU, R.Conv2d)}]}; b.BackendConfig.from_dict(d)',
    ],
)
def test_where_they_are_found(migrated: Callable[..., object], use: str) -> None:
    result = migrated(f"import torch.ao.quantization.backend_config as b\n{use}\n")
    assert [f.kind for f in result.findings] == ["reversed pattern"]  # type: ignore[attr-defined]
    assert result.after.endswith(f"{use}\n")  # type: ignore[attr-defined]
