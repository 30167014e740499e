"""Buffers that came from a file take the length of the first batch."""

from __future__ import annotations

import io

import pytest
import torch

from backquant.observe import (
    FakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)
from backquant.observe.protocol import with_shape


def _stored(module):
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def test_memory_that_cannot_be_resized_is_exchanged():
    buffer = _stored(torch.tensor([]))
    assert not buffer.untyped_storage().resizable()
    assert with_shape(buffer, (5,)) is buffer
    assert buffer.untyped_storage().nbytes() == 5 * buffer.element_size()


def test_a_shape_that_fits_keeps_the_values():
    buffer = torch.tensor([1.0, 2.0])
    before = buffer.data_ptr()
    assert torch.equal(with_shape(buffer, buffer.shape), torch.tensor([1.0, 2.0]))
    assert buffer.data_ptr() == before


_PER_CHANNEL = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric, "ch_axis": 0}
_BOUNDS = {"quant_min": -128, "quant_max": 127}
MODULES = {
    "observer": lambda: PerChannelMinMaxObserver(**_PER_CHANNEL),
    "fake quantize": lambda: FakeQuantize(PerChannelMinMaxObserver, **_BOUNDS, **_PER_CHANNEL),
    "fused": lambda: FusedMovingAvgObsFakeQuantize(
        MovingAveragePerChannelMinMaxObserver, **_BOUNDS, **_PER_CHANNEL
    ),
}


@pytest.mark.parametrize("kind", list(MODULES))
def test_per_channel_modules_from_a_file_measure_alike(kind):
    fresh = MODULES[kind]()
    stored = _stored(fresh)
    for _ in range(3):
        x = torch.randn(6, 4)
        assert torch.equal(stored(x), fresh(x))
    for name, value in fresh.state_dict().items():
        assert torch.equal(stored.state_dict()[name], value)


def test_a_bad_first_batch_leaves_the_channels_without_data():
    fused = MODULES["fused"]()
    x = torch.randn(3, 4)
    x[1, 2] = float("nan")
    fused(x)
    measured = fused.activation_post_process
    assert measured.min_val[1] == float("inf") and measured.max_val[1] == float("-inf")
    assert torch.isfinite(fused.scale).all()
    assert torch.isfinite(measured.min_val[[0, 2]]).all()
    fused(torch.randn(3, 4))
    assert torch.isfinite(measured.min_val).all()
