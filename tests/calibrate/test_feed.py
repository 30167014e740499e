"""Feeding batches: all forms, and every refusal with its place and nothing half-updated."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from backquant.calibrate import calibrate, calibration_state
from backquant.errors import CalibrationError, InputError, UsageError
from backquant.observe import HistogramObserver, MinMaxObserver, RecordingObserver


def _same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def test_all_forms_of_a_batch_measure_the_same(makers):
    batches = [(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(3)]
    model = makers.two_inputs().eval()
    forms = {
        "tuple": batches,
        "list": [list(batch) for batch in batches],
        "dict": [{"y": y, "x": x} for x, y in batches],
        "generator": (batch for batch in batches),
    }
    states = {}
    for name, form in forms.items():
        prepared = makers.prepare(model)
        report = calibrate(prepared, form)
        assert (report.batches, report.unseen) == (3, ())
        states[name] = calibration_state(prepared)
    assert all(_same(states["tuple"], state) for state in states.values())


def test_a_tensor_is_the_first_argument(makers):
    prepared = makers.prepare(makers.conv_net().eval())
    x = torch.randn(2, 3, 4, 4)
    calibrate(prepared, [x])
    assert prepared.activation_post_process_0.max_val == x.max()


def test_data_loader(makers):
    data = torch.utils.data.TensorDataset(torch.randn(10, 3, 4, 4))
    prepared = makers.prepare(makers.conv_net().eval())
    seen = []
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    report = calibrate(prepared, loader, progress=lambda done, total: seen.append((done, total)))
    assert report.batches == 3
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_progress_of_unknown_length(makers):
    prepared, seen = makers.prepare(makers.conv_net().eval()), []
    batches = (torch.randn(1, 3, 4, 4) for _ in range(2))
    calibrate(prepared, batches, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, None), (2, None)]


def test_no_gradients_and_no_change_of_training_flags(makers):
    model = makers.conv_net().eval()
    prepared = makers.prepare(model)
    prepared.drop.train()
    flags = {name: module.training for name, module in prepared.named_modules()}
    calibrate(prepared, [torch.randn(2, 3, 4, 4)])
    assert flags == {name: module.training for name, module in prepared.named_modules()}
    assert all(parameter.grad is None for parameter in prepared.parameters())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ([], "the calibration set is empty"),
        (iter([]), "the calibration set is empty"),
        (torch.zeros(2, 3, 4, 4), "is a Tensor, not an iterable of batches"),
        ({"x": torch.zeros(1)}, "is a dict, not an iterable of batches"),
        (None, "is a NoneType, not an iterable of batches"),
    ],
)
def test_no_set(makers, calibration, message):
    prepared = makers.prepare(makers.conv_net().eval())
    with pytest.raises(CalibrationError, match=message) as error:
        calibrate(prepared, calibration)
    assert re.search(r"calibration=\[(batch|calibration)\]", error.value.fix)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (float("nan"), "1 NaN and 0 infinite values"),
        (float("inf"), "0 NaN and 1 infinite values"),
        (float("-inf"), "0 NaN and 1 infinite values"),
    ],
)
def test_values_that_are_not_finite(makers, value, what):
    prepared = makers.prepare(makers.two_inputs().eval())
    good = {"x": torch.randn(2, 4), "y": torch.randn(2, 4)}
    bad = {"x": 100 * torch.randn(2, 4), "y": torch.randn(2, 4)}
    bad["y"][1, 2] = value
    calibrate(prepared, [good])
    before = calibration_state(prepared)
    with pytest.raises(CalibrationError) as error:
        calibrate(prepared, [bad])
    assert error.value.what == f"input 'y' of batch 0 holds {what}"
    assert _same(before, calibration_state(prepared))


def test_the_batches_before_a_refused_one_count(makers):
    prepared = makers.prepare(makers.conv_net().eval())
    good, bad = torch.ones(1, 3, 4, 4), torch.full((1, 3, 4, 4), float("nan"))
    with pytest.raises(CalibrationError, match="batch 1"):
        calibrate(prepared, [good, bad])
    assert prepared.activation_post_process_0.max_val == 1


def test_empty_batch(makers):
    prepared = makers.prepare(makers.conv_net().eval())
    with pytest.raises(CalibrationError, match="input 'x' of batch 0 holds no values"):
        calibrate(prepared, [torch.zeros(0, 3, 4, 4)])


@pytest.mark.parametrize("activation", [None, HistogramObserver, MinMaxObserver, RecordingObserver])
def test_a_batch_that_fails_inside_is_undone(makers, activation):
    """The second input has a wrong shape; by then the observer of the first has seen its data."""
    prepared = makers.prepare(makers.two_inputs().eval(), activation)
    calibrate(prepared, [(torch.randn(2, 4), torch.randn(2, 4))])
    before = calibration_state(prepared)
    recordings = [len(getattr(m, "tensor_val", ())) for m in prepared.modules()]
    batches = [(torch.randn(2, 4), torch.randn(2, 4)), (9 * torch.ones(2, 4), torch.randn(2, 5))]
    expected = makers.prepare(makers.two_inputs().eval(), activation)
    with pytest.raises(InputError) as error:
        calibrate(prepared, batches[1:])
    assert _same(before, calibration_state(prepared))
    assert recordings == [len(getattr(m, "tensor_val", ())) for m in prepared.modules()]
    assert error.value.what.startswith("batch 0 does not fit the model: ")
    assert "y: float32[2, 5]" in error.value.where
    calibrate(expected, batches[:1])
    with pytest.raises(InputError) as error:
        calibrate(expected, batches)
    assert error.value.what.startswith("batch 1 ")
    assert error.value.fix == "give batches like those before: x: float32[2, 4], y: float32[2, 4]"


def test_a_first_batch_of_the_wrong_shape_names_what_the_model_takes(makers):
    prepared = makers.prepare(makers.conv_net().eval())
    with pytest.raises(InputError) as error:
        calibrate(prepared, [torch.randn(1, 1, 4, 4)])
    assert "x: float32[1, 1, 4, 4]" in error.value.where
    assert "'x' has in_channels=3 for 'conv'" in error.value.fix


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        ((1, torch.zeros(1, 3, 4, 4)), "too many positional arguments"),
        ({"image": torch.zeros(1, 3, 4, 4)}, "missing a required argument: 'x'"),
        ((), "missing a required argument: 'x'"),
    ],
)
def test_arguments_that_the_model_does_not_take(makers, batch, what):
    prepared = makers.prepare(makers.conv_net().eval())
    with pytest.raises(InputError, match="batch 0 does not fit") as error:
        calibrate(prepared, [batch])
    assert what in error.value.what
    assert "forward takes (x" in error.value.fix


def test_nothing_is_printed_when_a_batch_fails(makers, capsys):
    prepared = makers.prepare(makers.conv_net().eval())
    with pytest.raises(InputError):
        calibrate(prepared, [torch.randn(1, 1, 4, 4)])
    printed = capsys.readouterr()
    assert printed.out == printed.err == ""


def test_an_observer_that_saw_no_data_is_reported(makers):
    class Loses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.first(x), self.second(x[5:])

    prepared = makers.prepare(Loses().eval())
    report = calibrate(prepared, [torch.randn(2, 4)])
    assert {unseen.value for unseen in report.unseen} == {"getitem", "second"}


def test_only_prepared_models():
    with pytest.raises(UsageError, match="not prepared"):
        calibrate(torch.fx.symbolic_trace(nn.ReLU()), [torch.zeros(1)])
