"""Which observers have data, and undoing."""

from __future__ import annotations

import pytest
import torch

from backquant.calibrate import saw_data, site_observers
from backquant.calibrate.observers import unchanged_on_error
from backquant.observe import (
    FakeQuantize,
    FixedQParamsObserver,
    FusedMovingAvgObsFakeQuantize,
    HistogramObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    RecordingObserver,
)

MEASURING = [MinMaxObserver, HistogramObserver, PerChannelMinMaxObserver, FakeQuantize]


@pytest.mark.parametrize("make", MEASURING, ids=lambda cls: cls.__name__)
def test_saw_data(make):
    observer = make()
    assert not saw_data(observer)
    observer(torch.randn(3, 4))
    assert saw_data(observer)


@pytest.mark.parametrize("make", [PlaceholderObserver, lambda: FixedQParamsObserver(0.1, 0)])
def test_what_measures_nothing_needs_no_data(make):
    assert saw_data(make())


@pytest.mark.parametrize("make", [*MEASURING, FusedMovingAvgObsFakeQuantize, RecordingObserver])
def test_undo(make):
    observer, twin = make(), make()
    for module in (observer, twin):
        module(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
    with pytest.raises(KeyError), unchanged_on_error([observer]):
        observer(100 * torch.randn(3, 4))
        raise KeyError
    x = torch.randn(3, 4)
    assert torch.equal(observer(x), twin(x))
    first, second = observer.state_dict(), twin.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in second)
    assert len(getattr(observer, "tensor_val", ())) == len(getattr(twin, "tensor_val", ()))


def test_shared_observers_are_listed_once(makers):
    prepared = makers.prepare(makers.two_inputs().eval())
    found = site_observers(prepared)
    assert len({id(observer) for observer in found.values()}) == len(found)
    used = {
        id(getattr(prepared, n.target)) for n in prepared.graph.nodes if "post" in str(n.target)
    }
    assert used == {id(observer) for observer in found.values()}
