"""More through ``prepare_fx``: tests/api/custom/test_bad_entries.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
)
from backquant.errors import ConfigError
from backquant.observe import MinMaxObserver, default_weight_observer
from backquant.qconfig import QConfig, QConfigMapping

WIDE = DTypeWithConstraints(torch.quint8)
NARROW = DTypeWithConstraints(torch.quint8, quant_max_upper_bound=127)
SEVEN = MinMaxObserver.with_args(quant_min=0, quant_max=127)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Bilinear(4, 4, 4)

    def forward(self, x):
        return torch.cat([self.one(x), self.two(x, x)], 1)


def backend(bilinear: DTypeWithConstraints) -> BackendConfig:
    def entry(op, dtype):
        config = DTypeConfig(dtype, dtype, torch.qint8, torch.float)
        return BackendPatternConfig(op).add_dtype_config(config)

    cat = entry(torch.cat, WIDE)
    cat.set_observation_type(ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT)
    entries = [entry(nn.Linear, WIDE), entry(nn.Bilinear, bilinear), cat]
    return BackendConfig("mine").set_backend_pattern_configs(entries)


def mapping(second) -> QConfigMapping:
    asked = QConfigMapping().set_global(QConfig(MinMaxObserver, default_weight_observer))
    return asked.set_module_name("two", QConfig(second, default_weight_observer))


def test_the_first_observer_suits_all(flow):
    prepared = flow.prepare(Joined().eval(), mapping(SEVEN), backend(WIDE))
    shared = {id(getattr(prepared, f"activation_post_process_{i}")) for i in (1, 3)}
    assert prepared.activation_post_process_1.quant_max == 255 and shared


def test_a_producer_that_may_not_have_it(flow):
    with pytest.raises(
        ConfigError, match=r"gives \[0, 255\], and \[…, 127\] is supported"
    ) as caught:
        flow.prepare(Joined().eval(), mapping(SEVEN), backend(NARROW))
    assert caught.value.where == "mine, entry 1 (Bilinear), node 'two'"
