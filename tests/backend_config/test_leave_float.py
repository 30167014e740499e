"""Rules for what stays float by default: data that is checked, compared and written."""

from __future__ import annotations

import operator

import pytest
import torch

from backquant import BackendConfig
from backquant.backend_config import BackendDefaults, LeaveFloat, QuantDefault
from backquant.backend_config.derived import default_lines
from backquant.errors import SpecError

MINMAX = QuantDefault("minmax", dtype=torch.quint8)
RULE = LeaveFloat((operator.add,), after=(torch.nn.Linear,), with_table=True)


def test_what_is_refused() -> None:
    with pytest.raises(SpecError, match="says nothing of the places"):
        LeaveFloat((torch.add,))
    with pytest.raises(SpecError, match="names its operators"):
        LeaveFloat((), with_table=True)
    with pytest.raises(SpecError, match="after is a tuple"):
        LeaveFloat((torch.add,), after=torch.nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="with_table"):
        LeaveFloat((torch.add,), with_table=1)  # type: ignore[arg-type]
    with pytest.raises(SpecError) as caught:
        LeaveFloat((torch.add,), before=(torch.nn.LayerNorm, 3))
    assert caught.value.where.startswith("before[1]")
    with pytest.raises(SpecError, match="not patterns"):
        LeaveFloat(((torch.add, torch.relu),), with_table=True)
    with pytest.raises(SpecError, match="operators or about their results"):
        LeaveFloat((torch.add,), with_table=True, results=True)
    with pytest.raises(SpecError, match="expected a LeaveFloat"):
        BackendDefaults(MINMAX, MINMAX, leave_float=("add",))  # type: ignore[arg-type]


def test_in_defaults() -> None:
    defaults = BackendDefaults(MINMAX, MINMAX, leave_float=(RULE,))
    assert BackendDefaults.from_dict(defaults.to_dict()) == defaults
    assert defaults != BackendDefaults(MINMAX, MINMAX)
    assert repr(RULE) in repr(defaults)
    config = BackendConfig("mine").set_defaults(defaults)
    assert default_lines(config)[-1] == "operator.add – float after nn.Linear, with a mask or table"
    other = BackendConfig("mine").set_defaults(BackendDefaults(MINMAX, MINMAX))
    [change] = config.diff(other).fields
    assert change.field == "defaults.leave_float[0]"


def test_in_a_file(tmp_path: object) -> None:
    config = BackendConfig("mine").set_defaults(
        BackendDefaults(MINMAX, MINMAX, leave_float=(RULE,))
    )
    path = f"{tmp_path}/mine.yaml"
    config.save(path)
    assert BackendConfig.load(path) == config
