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


class _Rotary(nn.Module):
    """Angles in float64 (diffusers' Flux)."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        rates = 0.1 ** torch.arange(4, dtype=torch.float64)
        angles = torch.outer(at.double(), rates)
        angles = torch.cat((angles, angles), -1)
        return self.after(self.before(x) * angles.cos().float())


class _Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 4)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.before(x)) * self.filter
        return self.after(torch.fft.irfft(torch.cat((spectrum, spectrum)), n=8))


_WIDE = {
    "float64": (_Rotary, lambda: (torch.randn(2, 5, 8), torch.arange(5.0))),
    "complex64": (_Spectrum, lambda: (torch.randn(2, 8),)),
}


def _prepared(how: str, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.fx.GraphModule:
    if how == "calibrated":
        mapping = backquant.get_default_qconfig_mapping("x86")
        return backquant.prepare_fx(model.eval(), mapping, inputs)
    mapping = backquant.get_default_qat_qconfig_mapping("x86")
    return backquant.prepare_qat_fx(model.train(), mapping, inputs)


@pytest.mark.parametrize("how", ["calibrated", "trained"])
@pytest.mark.parametrize("dtype", list(_WIDE))
def test_what_computes_in_other_numbers_inside_of_a_model_stays_float_with_the_reason(
    dtype: str, how: str
) -> None:
    """Their observers failed in training ("Float but found Double"), their kernels at the first call."""
    torch.manual_seed(0)
    kind, make = _WIDE[dtype]
    model, inputs = kind(), make()
    with pytest.warns(UserWarning, match=f"a tensor of {dtype}"):
        prepared = _prepared(how, model, inputs)
    prepared(*inputs)
    quantized = backquant.convert_fx(prepared.eval())
    joined = next(row for row in quantized.report.rows if row.operator == "torch.cat")
    assert joined.reasons[0].rule == ReasonCode.DTYPE
    assert joined.reasons[0].asked == f"a tensor of {dtype}"
    layers = [row for row in quantized.report.rows if row.module_path in ("before", "after")]
    assert [row.outcome for row in layers] == ["quantized"] * 2
    with torch.no_grad():
        noise = (quantized(*inputs) - model(*inputs)).square().sum() / model(*inputs).square().sum()
    assert float(noise) < 1e-2


BY_HAND = {
    "backquant.quantize(model.float()": lambda _, n: backquant.quantize(
        nn.Linear(4, 4).to(n["dtype"]).float(), [n["x"].float()]
    ),
}
