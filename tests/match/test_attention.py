"""Attention without an entry: the reason says what would quantize it, and that does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backquant
from backquant.backend_config import BackendConfig, QDQRules, get_backend_config


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inside, self.outside, self.options = nn.Linear(16, 48), nn.Linear(16, 16), options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.inside(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], **self.options)
        return self.outside(mixed.transpose(1, 2).flatten(2))


X = torch.randn(2, 5, 16)


def without_rules(name: str) -> BackendConfig:
    """A description that leaves nothing in float by default."""
    backend = get_backend_config(name)
    assert backend.defaults is not None
    return backend.set_defaults(replace(backend.defaults, leave_float=()))


def reason(backend: Any, **options: Any) -> Any:
    report = backquant.explain(Attention(**options).eval(), X, backend=backend)
    [row] = [row for row in report.rows if "scaled_dot" in row.operator]
    return row.reasons[0]


@pytest.mark.parametrize("name", ["x86", "qnnpack", "fbgemm", "native"])
def test_the_fix_quantizes_it(name: str) -> None:
    found = reason(without_rules(name))
    assert found.rule == "no-entry"
    assert 'set_qdq(QDQRules(attention="products"))' in found.fix
    backend = without_rules(name).set_qdq(QDQRules(attention="products"))
    model = Attention().eval()
    made = backquant.quantize(model, backend=backend, calibration=[X], slower="keep")
    assert made.report.coverage == 1.0
    torch.testing.assert_close(made(X), model(X), atol=0.05, rtol=0)


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        (without_rules("x86"), {"attn_mask": torch.zeros(5, 5)}),  # may be added: it stays whole
        (without_rules("x86"), {"dropout_p": 0.1}),
        ("x86_lowbit", {}),  # no integer products
        ("x86", {}),  # in float by default
        ("qnnpack", {}),
    ],
)
def test_no_fix_where_none_works(backend: Any, options: dict[str, Any]) -> None:
    found = reason(backend, **options)
    assert found.rule == "no-entry"
    assert not found.fix
