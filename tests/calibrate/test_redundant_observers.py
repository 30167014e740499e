"""Which measurements are left out, and that nothing is lost with them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backquant
from backquant.calibrate import calibrate, calibration_state
from backquant.calibrate.observers import called_directly, measured_again, passing_through
from backquant.errors import InputError
from backquant.observe import HistogramObserver, MinMaxObserver, MovingAverageMinMaxObserver
from backquant.qconfig import QConfig, QConfigMapping


class Moves(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        joined = torch.cat([self.left(x), self.right(x)], 1)
        return self.last(joined.reshape(-1, 2, 8).transpose(1, 2).reshape(-1, 16))


class Windows(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return F.avg_pool2d(F.max_pool2d(self.conv(x), 2), 2)


class Clamped(nn.Module):
    def __init__(self, twice=False):
        super().__init__()
        self.conv, self.act, self.twice = nn.Conv2d(3, 4, 3), nn.ReLU6(), twice

    def forward(self, x):
        x = self.conv(x) * 1 if self.twice else self.conv(x)
        return self.act(x) + x if self.twice else self.act(x)


def prepared_with(model, observer, example):
    weight = MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
    mapping = QConfigMapping().set_global(QConfig(observer, weight))
    return backquant.prepare_fx(
        model.eval(), mapping, (example,), backend_config=backquant.get_backend_config("x86")
    )


def observed(prepared, name):
    """What the observer at site ``name`` stands behind."""
    node = next(n for n in prepared.graph.nodes if n.target == name)
    return node.args[0].name


@pytest.mark.parametrize("observer", [HistogramObserver, MinMaxObserver])
def test_moved_values_are_left_out_and_extremes_stay(observer):
    x = torch.randn(6, 8)
    prepared = prepared_with(Moves(), observer, x)
    again = measured_again(prepared)
    assert {observed(prepared, name).rstrip("_0123456789") for name in again} == {
        "cat",
        "reshape",
        "transpose",
    }
    whole = copy.deepcopy(prepared)
    calibrate(prepared, [x]), whole(x)
    for name, value in calibration_state(whole).items():
        if name.endswith(("min_val", "max_val")):
            assert torch.equal(calibration_state(prepared)[name], value), name


def test_every_value_is_counted_once():
    x = torch.randn(6, 8)
    prepared = prepared_with(Moves(), HistogramObserver, x)
    calibrate(prepared, [x])
    shared = prepared.get_submodule(measured_again(prepared)[0])
    assert int(shared.bin_count.sum()) == 6 * 16


def test_pooling_selects_or_calculates():
    x = torch.randn(1, 3, 12, 12)
    prepared = prepared_with(Windows(), HistogramObserver, x)
    again = {observed(prepared, name) for name in measured_again(prepared)}
    assert again == {"max_pool2d"}


def test_observers_that_depend_on_order_measure_everywhere():
    x = torch.randn(6, 8)
    assert measured_again(prepared_with(Moves(), MovingAverageMinMaxObserver, x)) == ()


def test_what_a_clamp_cuts_off_is_no_part_of_the_range():
    x = 20 * torch.randn(1, 3, 12, 12)
    prepared = prepared_with(Clamped(), HistogramObserver, x)
    names = measured_again(prepared)
    assert {observed(prepared, name) for name in names} == {"conv"}
    calibrate(prepared, [x])
    shared = prepared.get_submodule(names[0])
    assert (shared.min_val, shared.max_val) == (0, 6)
    assert int(shared.bin_count.sum()) == 4 * 10 * 10


def test_ranges_of_extremes_keep_what_a_clamp_cuts_off():
    x = torch.randn(1, 3, 12, 12)
    assert measured_again(prepared_with(Clamped(), MinMaxObserver, x)) == ()


def test_a_second_reader_of_what_is_clamped_needs_it_measured():
    x = torch.randn(1, 3, 12, 12)
    prepared = prepared_with(Clamped(twice=True), HistogramObserver, x)
    assert measured_again(prepared) == ()


def test_modules_come_back_after_an_error():
    x = torch.randn(6, 8)
    prepared = prepared_with(Moves(), HistogramObserver, x)
    before = dict(prepared.named_modules(remove_duplicate=False))
    with pytest.raises(InputError):
        calibrate(prepared, [torch.randn(6, 9)])
    assert dict(prepared.named_modules(remove_duplicate=False)) == before
    assert list(dict(prepared._modules)) == [n for n in before if n and "." not in n]


def test_passing_through_returns_the_input():
    model = nn.Sequential(nn.Tanh(), nn.ReLU())
    x = torch.randn(3)
    with passing_through(model, ["0"]):
        assert torch.equal(model(x), x.relu())
    assert torch.equal(model(x), x.tanh().relu())


def test_observers_are_called_directly_under_each_of_their_names() -> None:
    observer = HistogramObserver()
    model = nn.Module()
    model.first, model.second, model.linear = observer, observer, nn.Linear(2, 2)
    modules = list(model.modules())
    with called_directly(model, modules):
        assert model.first == model.second == observer.forward
        assert model.linear is modules[-1]
    assert model.first is model.second is observer


@pytest.mark.parametrize("where", ["observer", "model", "all modules"])
def test_hooks_are_called(where: str) -> None:
    x, seen = torch.randn(6, 8), []
    prepared = prepared_with(Moves(), HistogramObserver, x)
    register = {
        "observer": prepared.activation_post_process_0.register_forward_hook,
        "model": prepared.register_forward_pre_hook,
        "all modules": nn.modules.module.register_module_forward_hook,
    }
    handle = register[where](lambda *_: seen.append(type(prepared.activation_post_process_0)))
    calibrate(prepared, [x])
    handle.remove()
    assert set(seen) == {HistogramObserver}


def test_a_refused_batch_leaves_the_extremes_of_the_ones_before() -> None:
    """Extremes and values that wait belong to what is undone."""
    x, model = torch.randn(6, 8), Moves()
    prepared, twin = (prepared_with(model, HistogramObserver, x) for _ in range(2))
    calibrate(twin, [x])
    with pytest.raises(InputError):
        calibrate(prepared, [x, torch.full((6, 9), 100.0)])
    for name, value in twin.state_dict().items():
        assert torch.equal(prepared.state_dict()[name], value), name
