"""Models, and layers, whose weights are not float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import ConfigError
from backquant.reason_codes import ReasonCode


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_of_another_dtype_is_refused_before_anything_is_done(
    dtype: torch.dtype, snapshot: Callable[..., None]
) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)).to(dtype), torch.zeros(2, 4, dtype=dtype)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(ConfigError, match="only float32 weights") as error:
        backquant.quantize(model, x, backend="x86", calibration=[x])
    snapshot("only-other-weights", error.value, {str(dtype): "<dtype>"})
    assert not calls
    x = x.float()
    assert backquant.quantize(model.float(), x, backend="x86", calibration=[x]) is not None


class _Parts(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.other = nn.Linear(16, 16, dtype=dtype)
        self.plain = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(self.other(x.to(self.dtype)).abs().float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("capture", ["trace", "export"])
def test_a_layer_of_another_dtype_stays_float_with_the_reason(
    dtype: torch.dtype, capture: str
) -> None:
    torch.manual_seed(0)
    model, x = _Parts(dtype).eval(), torch.randn(8, 16)
    quantized = backquant.quantize(
        model, x, backend="x86", calibration=[x], slower="keep", capture=capture
    )
    [row] = (row for row in quantized.report.rows if row.module_path == "other")
    assert row.outcome != "quantized"
    assert [reason.rule for reason in row.reasons][:1] == [ReasonCode.DTYPE]
    noise = (quantized(x) - model(x)).square().sum() / model(x).square().sum()
    assert float(noise.detach()) < 1e-3
