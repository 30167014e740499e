"""What reports and warnings say of standalone and custom modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import backquant as bq
from backquant.errors import CoverageError, UsageError
from backquant.nn import quantizable


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 8)
        self.act = nn.CELU()
        self.two = nn.Linear(8, 4)

    def forward(self, x):
        return self.two(self.act(self.one(x)))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Inner()
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.block(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.outer = Outer()
        self.lstm = nn.LSTM(2, 3)

    def forward(self, x):
        return self.lstm(self.outer(self.stem(x)))[0]


def custom() -> bq.PrepareCustomConfig:
    block = bq.PrepareCustomConfig().set_standalone_module_name("block", None, ())
    config = bq.PrepareCustomConfig().set_standalone_module_name("outer", None, (), block)
    return config.set_float_to_observed_mapping(nn.LSTM, quantizable.LSTM)


ROWS = ["stem", "outer", "outer.block", "outer.block.one", "outer.block.act", "outer.block.two"]


def test_rows_of_nested_modules() -> None:
    model, x = Model(), torch.randn(5, 2, 4)
    before = bq.explain(model, x, prepare_custom_config=custom())
    quantized = bq.quantize(model, calibration=[x], prepare_custom_config=custom(), slower="keep")
    after = quantized.report
    for report in (before, after):
        assert [row.node for row in report.rows][:6] == ROWS
        outcomes = {row.node: row.outcome for row in report.rows}
        assert outcomes["outer.block.act"] == "float"
        assert outcomes["outer.last"] == "quantized"
        costs = {row.node: row.multiply_adds for row in report.rows}
        assert costs["outer.block.one"] == 10 * 4 * 8
        assert costs["outer"] == costs["outer.block"] == 0
    lstm = [next(row for row in report.rows if row.node == "lstm") for report in (before, after)]
    assert [row.outcome for row in lstm] == ["quantized", "unlowered"]  # it computes in float
    assert lstm[1].done == 0 and after.coverage < before.coverage == 1.0
    kernels = {row.node: row.kernel for row in after.rows}
    assert all("linear" in kernels[n] for n in ("stem", "outer.block.one", "outer.last"))
    assert not any(row.observers[0].scale is None for row in after.rows if row.node == "outer.last")
    assert "outer.block.act" in after.to_html()
    assert "standalone" in after.table() and "custom module" in str(after)


def test_requirements_reach_inside() -> None:
    model, x = Model(), torch.randn(5, 2, 4)
    options: Any = {"calibration": [x], "prepare_custom_config": custom()}
    bq.quantize(model, require=["outer.block.one", "outer.last"], **options)
    with pytest.raises(CoverageError, match=r"lstm \(LSTM\).*computes in float"):
        bq.quantize(model, require=["lstm"], **options)
    with pytest.raises(CoverageError, match=r"outer\.block\.act"):
        bq.quantize(model, require=["outer.block.act"], **options)
    with pytest.raises(UsageError, match="no operator"):
        bq.quantize(model, require=["outer.block.three"], **options)


def test_costs_do_not_reach_the_observers() -> None:
    model, x = Model(), torch.full((5, 2, 4), 100.0)
    small = torch.rand(5, 2, 4)
    quantized = bq.quantize(model, x, calibration=[small], prepare_custom_config=custom())
    twin = bq.quantize(model, small, calibration=[small], prepare_custom_config=custom())
    assert torch.equal(quantized(small), twin(small))


def test_one_warning_for_all_that_is_skipped() -> None:
    model, x = Model().eval(), torch.randn(5, 2, 4)
    narrow = bq.MinMaxObserver.with_args(dtype=torch.qint32, quant_min=0, quant_max=3)
    mapping = bq.QConfigMapping().set_global(bq.QConfig(narrow, bq.observe.default_weight_observer))
    with pytest.warns(UserWarning) as caught:
        bq.prepare_fx(
            model, mapping, x, custom(), backend_config=bq.backend_config.get_x86_backend_config()
        )
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "operators stay float on x86" in text
    assert "in standalone module 'outer.block': 2 operators stay float on x86" in text
    assert caught[0].filename == __file__
