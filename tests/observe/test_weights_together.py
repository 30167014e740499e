from __future__ import annotations

from typing import Any

import pytest
import torch

from backquant.observe import MinMaxObserver, PerChannelMinMaxObserver
from backquant.observe.protocol import qparam_dict
from backquant.observe.together import weights_together

SYMMETRIC = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric}


def alone(make: Any, weight: torch.Tensor) -> dict[str, Any]:
    observer = make()
    observer(weight)
    return qparam_dict(observer)


@pytest.mark.parametrize(
    "settings",
    [
        SYMMETRIC,
        {**SYMMETRIC, "quant_min": -64, "quant_max": 63, "eps": 2**-12},
        {"qscheme": torch.per_channel_affine},
        {"qscheme": torch.per_channel_affine_float_qparams},
    ],
)
def test_the_same_bits_as_one_by_one(settings: dict[str, Any]) -> None:
    make = PerChannelMinMaxObserver.with_args(**settings)
    shapes = [(8, 8, 3, 3)] * 5 + [(8, 72)] * 2 + [(4, 3)] * 3
    weights = [torch.randn(shape) * 10.0 ** (i - 5) for i, shape in enumerate(shapes)]
    weights += [torch.zeros(4, 3), torch.randn(3, 4).t(), weights[0]]
    found = weights_together(make, weights)
    assert len(found) == 12
    for weight in weights:
        expected, got = alone(make, weight), found[id(weight)]
        assert expected.keys() == got.keys()
        for name, value in expected.items():
            same = torch.equal(value, got[name]) if isinstance(value, torch.Tensor) else None
            assert value == got[name] if same is None else same, name
            assert same is None or value.dtype == got[name].dtype


def test_the_tensors_are_their_own() -> None:
    weights = [torch.randn(4, 3) for _ in range(3)]
    found = weights_together(PerChannelMinMaxObserver, weights)
    tensors = [qparams[name] for qparams in found.values() for name in ("scale", "zero_point")]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 6
    assert all(t.untyped_storage().nbytes() == t.numel() * t.itemsize for t in tensors)


def test_what_is_left_out() -> None:
    pair = [torch.randn(4, 3) for _ in range(2)]
    assert not weights_together(MinMaxObserver, pair)
    assert not weights_together(PerChannelMinMaxObserver.with_args(ch_axis=1), pair)
    assert not weights_together(PerChannelMinMaxObserver, pair[:1])
    assert not weights_together(PerChannelMinMaxObserver, [t.double() for t in pair])
    assert not weights_together(PerChannelMinMaxObserver, [torch.randn(2, 1 << 15)] * 2)
    pair[0][0, 0] = float("nan")
    assert not weights_together(PerChannelMinMaxObserver, pair)
