"""Attention masks."""

from __future__ import annotations

import pytest
import torch

from backquant.errors import InputError
from backquant.nn.quantizable.attention import additive_mask

SIZES = (2, 3, 4, 5)  # N, heads, L, S


def test_both_masks_add_up() -> None:
    attention, padding = torch.randn(4, 5), torch.rand(2, 5) > 0.5
    merged = additive_mask(attention, padding, SIZES, torch.float32)
    assert merged is not None and merged.shape == (6, 4, 5)
    for row in range(6):
        expected = attention.masked_fill(padding[row // 3], float("-inf"))
        assert torch.equal(merged[row], expected)


def test_none_and_byte_masks() -> None:
    assert additive_mask(None, None, SIZES, torch.float32) is None
    byte = torch.ones(6, 4, 5, dtype=torch.uint8)
    merged = additive_mask(byte, None, SIZES, torch.float32)
    assert merged is not None and torch.isinf(merged).all()


@pytest.mark.parametrize(
    ("attention", "padding", "message"),
    [
        (torch.zeros(5, 4), None, r"attn_mask has shape \(5, 4\)"),
        (None, torch.zeros(5, 2), r"key_padding_mask has shape \(5, 2\)"),
        (torch.zeros(4, 5, dtype=torch.int64), None, "boolean or floating point, got torch.int64"),
    ],
)
def test_refusals(
    attention: torch.Tensor | None, padding: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(InputError, match=message) as error:
        additive_mask(attention, padding, SIZES, torch.float32)
    assert error.value.fix
