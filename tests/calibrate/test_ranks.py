"""Synchronizing a group of one; ``tests/api/qat/test_distributed.py`` has two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import backquant
from backquant.calibrate import synchronize_observers
from backquant.errors import UsageError
from backquant.prepare import buffers_of_histograms


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _prepared(mapping=None):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    prepared = backquant.prepare_qat_fx(
        model,
        mapping or backquant.get_default_qat_qconfig_mapping("x86"),
        torch.randn(2, 3, 4, 4),
        backend_config=backquant.backend_config.get_x86_backend_config(),
    )
    prepared(torch.randn(2, 3, 4, 4))
    return prepared


def _with(observer):
    fake = backquant.FakeQuantize.with_args(observer=observer)
    weight = backquant.observe.default_weight_fake_quant
    return backquant.QConfigMapping().set_global(backquant.QConfig(fake, weight))


MAPPINGS = {
    "moving average": lambda: None,
    "min/max": lambda: _with(backquant.MinMaxObserver),
    "histogram": lambda: _with(backquant.HistogramObserver),
}


@pytest.mark.parametrize("kind", list(MAPPINGS))
def test_one_rank_alone_stays_as_it_is(group, kind):
    prepared = _prepared(MAPPINGS[kind]())
    before = {name: value.clone() for name, value in prepared.state_dict().items()}
    synchronize_observers(prepared)
    after = prepared.state_dict()
    assert list(before) == list(after)
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def test_the_wrapped_model_may_be_passed(group):
    synchronize_observers(DistributedDataParallel(_prepared()))


def test_before_any_data(group):
    model = nn.Sequential(nn.Linear(2, 2))
    mapping = backquant.get_default_qat_qconfig_mapping("x86")
    prepared = backquant.prepare_qat_fx(model, mapping, torch.zeros(1, 2))
    synchronize_observers(prepared)
    assert prepared.get_submodule("activation_post_process_0").scale == 1.0


def test_models_that_are_not_prepared_are_refused(group):
    with pytest.raises(UsageError, match="this model is not prepared"):
        synchronize_observers(nn.Linear(1, 1))


def test_histograms_are_left_out_of_what_ddp_copies(group):
    prepared = _prepared(_with(backquant.HistogramObserver))
    names = buffers_of_histograms(prepared)
    assert any(name.endswith("bin_count") for name in names)
    wrapped = DistributedDataParallel(prepared)
    assert set(names) <= set(wrapped.parameters_to_ignore)
    assert DistributedDataParallel(_prepared()).parameters_to_ignore == set()


def test_buffers_that_the_user_leaves_out_are_kept(group):
    prepared = _prepared(_with(backquant.HistogramObserver))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(prepared, ["3.weight"])
    ignored = prepared._ddp_params_and_buffers_to_ignore
    assert ignored[0] == "3.weight" and len(ignored) > 1
