from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from backquant.backend_config import BackendConfig, BackendPatternConfig, DTypeConfig
from backquant.backend_config.validate import validate
from backquant.errors import SpecError


@dataclass
class Engine:
    dtypes: tuple[torch.dtype, ...]


@dataclass
class TwoLists:
    activation_dtypes: tuple[torch.dtype, ...]
    weight_dtypes: tuple[torch.dtype, ...]


def backend(*configs: DTypeConfig) -> BackendConfig:
    entry = BackendPatternConfig(torch.nn.Linear).set_dtype_configs(configs)
    return BackendConfig("mine").set_backend_pattern_config(entry)


INT8 = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
INT16 = DTypeConfig(torch.int16, torch.int16, torch.qint8, torch.float)


def test_no_engine_says_nothing():
    assert validate(backend(INT16)) == []


@pytest.mark.parametrize(
    "engine",
    [
        Engine((torch.quint8, torch.qint8)),
        Engine((torch.uint8, torch.int8)),
        TwoLists((torch.uint8,), (torch.int8,)),
    ],
)
def test_dtypes_are_compared_by_storage(engine):
    assert validate(backend(INT8), engine) == []


def test_an_error_when_nothing_can_run_else_a_warning():
    engine = Engine((torch.uint8, torch.int8))
    findings = validate(backend(INT16), engine)
    assert [(f.severity, f.rule) for f in findings] == [("error", "engine-dtype")] * 2
    assert findings[0].message == "the engine has no torch.int16"
    assert "torch.uint8" in findings[0].fix
    findings = validate(backend(INT8, INT16), engine)
    assert [f.severity for f in findings] == ["warning"] * 2
    assert findings[0].place == "entry 0 (torch.nn.Linear): dtype_configs[1].input_dtype"


def test_float_outputs_run_everywhere():
    dynamic = DTypeConfig(torch.quint8, torch.float, torch.qint8, is_dynamic=True)
    assert validate(backend(dynamic), Engine((torch.uint8, torch.int8))) == []


def test_an_object_that_is_no_engine():
    with pytest.raises(SpecError, match="names its dtypes"):
        validate(backend(INT8), object())
