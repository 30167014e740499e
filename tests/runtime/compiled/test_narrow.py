"""Attention and products of activations in bfloat16: on request, where the CPU has it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backquant
from backquant.errors import EngineError, UsageError
from backquant.runtime.compiled.modules import compilable
from backquant.runtime.compiled.operators import check_float_dtype


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v) + torch.matmul(q, k.transpose(1, 2)) @ v


def test_only_these_are_narrow_and_results_are_floats() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 32)
    quantized = backquant.quantize(Attention().eval(), backend="x86", calibration=[x])
    wanted = quantized(x)
    exact = compilable(quantized.graph_module)(x)
    narrow = compilable(quantized.graph_module, torch.bfloat16)(x)
    assert narrow.dtype == torch.float32
    assert (exact - wanted).pow(2).sum() < 1e-3 * wanted.pow(2).sum()
    noise = (narrow - wanted).pow(2).sum() / wanted.pow(2).sum()
    assert 0 < noise < 1e-3  # bfloat16 has 8 bits: 50 dB each, some of which add up


def test_a_cpu_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_vnni": True})
    with pytest.raises(EngineError, match="no instructions for bfloat16"):
        check_float_dtype(torch.bfloat16)
    check_float_dtype(torch.float32)


def test_another_dtype() -> None:
    with pytest.raises(UsageError, match="float16"):
        check_float_dtype(torch.float16)
