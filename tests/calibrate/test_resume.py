"""Saving, resuming and merging give what one run gives, bit for bit."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from safetensors.torch import load, save

from backquant.calibrate import calibrate, calibration_state, load_calibration_state, merge_state
from backquant.convert import convert_to_reference
from backquant.errors import CalibrationError, ConfigError, UsageError
from backquant.observe import HistogramObserver, MinMaxObserver, MovingAverageMinMaxObserver

ORDER_FREE = [HistogramObserver, MinMaxObserver.with_args(reduce_range=True)]


@pytest.fixture
def batches():
    return [(1 + i) * torch.randn(2, 3, 4, 4) for i in range(6)]


def _same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


@pytest.mark.parametrize("activation", [*ORDER_FREE, MovingAverageMinMaxObserver], ids=repr)
def test_resuming_equals_one_run(makers, batches, activation):
    model = makers.conv_net().eval()
    whole, first, second = (makers.prepare(model, activation) for _ in range(3))
    calibrate(whole, batches)
    calibrate(first, batches[:2])
    load_calibration_state(second, load(save(calibration_state(first))))
    calibrate(second, batches[2:])
    assert _same(calibration_state(whole), calibration_state(second))
    assert convert_to_reference(whole).code == convert_to_reference(second).code


@pytest.mark.parametrize("activation", ORDER_FREE, ids=repr)
def test_merging_is_exact_in_any_order(makers, batches, activation):
    model = makers.conv_net().eval()
    whole = makers.prepare(model, activation)
    calibrate(whole, batches)
    ranks = [copy.deepcopy(makers.prepare(model, activation)) for _ in range(3)]
    for rank, prepared in enumerate(ranks):
        calibrate(prepared, batches[rank::3])
    for order in itertools.permutations(range(3)):
        merged = copy.deepcopy(ranks[order[0]])
        merge_state(merged, ranks[order[1]], calibration_state(ranks[order[2]]))
        assert _same(calibration_state(merged), calibration_state(whole))


def test_merging_leaves_the_others_alone(makers, batches):
    one, two = (makers.prepare(makers.conv_net().eval()) for _ in range(2))
    calibrate(one, batches[:1])
    calibrate(two, batches[1:])
    before = calibration_state(two)
    merge_state(one, two)
    assert _same(before, calibration_state(two))


def test_moving_averages_refuse_and_nothing_changes(makers, batches):
    one, two = (
        makers.prepare(makers.conv_net().eval(), MovingAverageMinMaxObserver) for _ in range(2)
    )
    calibrate(one, batches[:1])
    calibrate(two, batches[1:])
    before = calibration_state(one)
    with pytest.raises(ConfigError) as error:
        merge_state(one, two)
    assert "activation_post_process_0" in error.value.where
    assert _same(before, calibration_state(one))


def test_a_foreign_state_is_refused_and_nothing_changes(makers, batches):
    prepared = makers.prepare(makers.conv_net().eval())
    calibrate(prepared, batches[:1])
    before = calibration_state(prepared)
    other = makers.prepare(makers.two_inputs().eval())
    calibrate(other, [(torch.ones(1, 4), torch.ones(1, 4))])
    with pytest.raises(CalibrationError, match="does not fit the prepared model"):
        load_calibration_state(prepared, calibration_state(other))
    missing = dict(list(before.items())[:-1])
    with pytest.raises(CalibrationError, match="does not fit the prepared model"):
        load_calibration_state(prepared, missing)
    assert _same(before, calibration_state(prepared))


def test_the_state_is_plain_tensors_and_copies(makers, batches):
    prepared = makers.prepare(makers.conv_net().eval())
    state = calibration_state(prepared)
    calibrate(prepared, batches)
    assert torch.isinf(state["activation_post_process_0.min_val"])
    assert all(type(value) is torch.Tensor for value in state.values())


def test_only_prepared_models():
    with pytest.raises(UsageError):
        calibration_state(torch.fx.symbolic_trace(torch.nn.ReLU()))
