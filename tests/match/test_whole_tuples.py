"""Tuples that are joined as they are (``torch.cat(x.chunk(2))``): they were observed, which failed, and the
error said that the batch did not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.reason_codes import ReasonCode


class Net(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)
        self.between = between

    def forward(self, x):
        return self.two(self.between(self.one(x)))


BETWEEN: dict[str, Callable[[Any], Any]] = {
    "chunk": lambda x: torch.cat(x.chunk(2, 1), 1),
    "split": lambda x: torch.cat(torch.split(x, 2, 1), 1),
    "unbind": lambda x: torch.stack(x.unbind(1), 1),
    "slice": lambda x: torch.cat(x.chunk(4, 1)[::-1], 1),
    "hsplit": lambda x: torch.cat(torch.hsplit(x, 2), dim=1),
    "meshgrid": lambda x: x + torch.stack(torch.meshgrid(x[0], x[1], indexing="ij")).mean((0, 1)),
    "keyword": lambda x: torch.cat(tensors=x.chunk(2, 1), dim=1),
}


def _prepared(how: str, model: nn.Module, x: torch.Tensor) -> Any:
    if how == "trained":
        mapping = backquant.get_default_qat_qconfig_mapping("x86")
        return backquant.prepare_qat_fx(model.train(), mapping, x, backend_config="x86")
    mapping = backquant.get_default_qconfig_mapping("x86")
    return backquant.prepare_fx(model, mapping, x, backend_config="x86")


@pytest.mark.filterwarnings("ignore")  # what stays float
@pytest.mark.parametrize("how", ["calibrated", "trained", "quantize"])
@pytest.mark.parametrize("name", list(BETWEEN))
def test_they_are_not_observed(name: str, how: str) -> None:
    torch.manual_seed(0)
    model, x = Net(BETWEEN[name]).eval(), torch.randn(16, 8)
    if how == "quantize":
        quantized = backquant.quantize(
            model, x, backend="x86", calibration=[x], slower="keep", capture="trace"
        )
    else:
        prepared = _prepared(how, model, x)
        prepared(x)
        quantized = backquant.convert_fx(prepared.eval())
    with torch.no_grad():
        noise = (quantized(x) - model(x)).square().sum() / model(x).square().sum()
    assert float(noise) < 1e-2
    rows = quantized.report.rows
    assert [r.outcome for r in rows if r.module_path in ("one", "two")] == ["quantized"] * 2
    [joined] = [row for row in rows if row.operator in ("torch.cat", "torch.stack")]
    if how != "quantize":  # there moves between float operators are not asked for
        assert joined.reasons[0].rule == ReasonCode.WHOLE_TUPLE
    assert joined.outcome != "quantized"
