from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant
from backquant.backend_config import BackendConfig, BackendPatternConfig, DTypeConfig
from backquant.errors import EngineError
from backquant.lower import engine_info
from backquant.lower.engine_dtypes import check_engine_dtypes
from backquant.match.plan import Decision, Match, Outcome, Plan

X86 = engine_info("x86")


def plan_for(
    config: DTypeConfig, outcome: Outcome = Outcome.QUANTIZED
) -> tuple[Plan, BackendConfig]:
    backend = BackendConfig("b").set_backend_pattern_config(
        BackendPatternConfig(nn.Linear).add_dtype_config(config)
    )
    decision = Decision("fc", "Linear", "encoder.fc", outcome, match=0, dtype_config=0)
    return Plan(
        "b", matches=(Match(0, "Linear", ("fc",), "fc"),), decisions={"fc": decision}
    ), backend


FINE = {
    "static": DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float),
    "signed": DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float),
    "plain tokens": DTypeConfig(torch.uint8, torch.uint8, torch.int8),
    "no weight": DTypeConfig(torch.quint8, torch.quint8),
    "dynamic": DTypeConfig(torch.qint32, torch.float, torch.qint32, is_dynamic=True),
    "weight only": DTypeConfig(torch.float, torch.float, torch.quint4x2),
    "float16": DTypeConfig(torch.float16, torch.float16, torch.float16),
    "integers in, floats out": DTypeConfig(torch.qint32, torch.float),
}
LACKING = {
    "input and output": (DTypeConfig(torch.qint32, torch.qint32), 2),
    "weight": (DTypeConfig(torch.quint8, torch.quint8, torch.quint8), 1),
    "all": (DTypeConfig(torch.int16, torch.int16, torch.int16), 3),
}


@pytest.mark.parametrize("name", FINE)
def test_dtypes_that_run(name: str) -> None:
    check_engine_dtypes(*plan_for(FINE[name]), X86)


@pytest.mark.parametrize("name", LACKING)
def test_dtypes_that_do_not(name: str) -> None:
    config, count = LACKING[name]
    with pytest.raises(EngineError) as caught:
        check_engine_dtypes(*plan_for(config), X86)
    assert caught.value.where.count("encoder.fc (Linear): ") == count
    assert "uint8 activations and int8 weights" in caught.value.fix


def test_what_stays_float_asks_for_nothing() -> None:
    check_engine_dtypes(*plan_for(LACKING["all"][0], Outcome.FLOAT), X86)


@pytest.mark.parametrize("backend", ["x86", "onednn", "fbgemm", "qnnpack", "native"])
def test_what_built_in_backends_choose_by_default_runs_on_their_engines(backend: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Sigmoid(), nn.Flatten(), nn.Linear(16, 2)
    )
    backquant.quantize(model, backend=backend, calibration=[torch.randn(1, 3, 4, 4)])
