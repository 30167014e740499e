from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as ao

from backquant import observe
from backquant.errors import ConfigError
from backquant.observe import (
    FakeQuantize,
    FixedQParamsFakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)

SETTINGS: list[tuple[str, str, dict[str, Any]]] = [
    ("FakeQuantize", "MinMaxObserver", {}),
    ("FakeQuantize", "MinMaxObserver", {"quant_min": 0, "quant_max": 127}),
    (
        "FakeQuantize",
        "MinMaxObserver",
        {"dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric, "eps": 2**-12},
    ),
    ("FakeQuantize", "MovingAverageMinMaxObserver", {"reduce_range": True}),
    ("FakeQuantize", "MovingAverageMinMaxObserver", {"averaging_constant": 1, "is_dynamic": True}),
    (
        "FakeQuantize",
        "PerChannelMinMaxObserver",
        {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric, "ch_axis": 1},
    ),
    (
        "FakeQuantize",
        "MovingAveragePerChannelMinMaxObserver",
        {"qscheme": torch.per_channel_affine_float_qparams, "dtype": torch.quint4x2},
    ),
    ("FusedMovingAvgObsFakeQuantize", "MovingAverageMinMaxObserver", {}),
    (
        "FusedMovingAvgObsFakeQuantize",
        "MovingAverageMinMaxObserver",
        {"quant_min": -128, "quant_max": 127, "dtype": torch.qint8, "reduce_range": False},
    ),
    (
        "FusedMovingAvgObsFakeQuantize",
        "MovingAveragePerChannelMinMaxObserver",
        {
            "quant_min": -127,
            "quant_max": 127,
            "dtype": torch.qint8,
            "qscheme": torch.per_channel_symmetric,
            "eps": 2**-12,
            "averaging_constant": 0.3,
        },
    ),
]


def _both(
    name: str, observer: str, kwargs: dict[str, Any], oracle: Callable[..., Any]
) -> tuple[Any, Any]:
    ours = getattr(observe, name)(observer=getattr(observe, observer), **kwargs)
    return ours, oracle(name, observer=getattr(ao, observer), **kwargs)


@pytest.mark.parametrize(("name", "observer", "kwargs"), SETTINGS)
def test_outputs_gradients_and_state_equal_the_oracle(
    name: str, observer: str, kwargs: dict[str, Any], oracle: Callable[..., Any]
) -> None:
    ours, theirs = _both(name, observer, kwargs, oracle)
    for step in range(6):
        if step == 3:
            ours.disable_observer(), theirs.disable_observer()
        if step == 4:
            ours.disable_fake_quant(), theirs.disable_fake_quant()
        if step == 5:
            ours.enable_fake_quant(), theirs.enable_fake_quant()
            ours.enable_observer(), theirs.enable_observer()
        x = torch.randn(4, 5) * (step + 1)
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        out, expected = ours(mine), theirs(other)
        assert torch.equal(out, expected)
        out.square().sum().backward(), expected.square().sum().backward()
        assert torch.equal(mine.grad, other.grad)
        for key, value in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[key], value), key
    assert ours.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize(("name", "observer", "kwargs"), SETTINGS)
def test_copies_pickles_and_state_dicts_keep_the_state(
    name: str, observer: str, kwargs: dict[str, Any], oracle: Callable[..., Any]
) -> None:
    ours, theirs = _both(name, observer, kwargs, oracle)
    x = torch.randn(4, 5)
    ours(x), theirs(x)
    fresh, from_oracle = _both(name, observer, kwargs, oracle)[0], copy.deepcopy(ours)
    fresh.load_state_dict(ours.state_dict())
    from_oracle.load_state_dict(theirs.state_dict())
    others = [fresh, from_oracle, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
    ours.disable_observer(), theirs.disable_observer()
    for other in others:
        other.disable_observer()
        assert torch.equal(other(x * 1.5), theirs(x * 1.5))
        other.enable_observer()
    theirs.enable_observer()
    more = torch.randn(4, 5) * 2
    expected = theirs(more)
    assert all(torch.equal(other(more), expected) for other in others)


def test_the_range_of_a_partial_is_checked_against_its_dtype() -> None:
    with pytest.raises(ConfigError, match=r"outside of torch\.qint8"):
        FakeQuantize(MinMaxObserver.with_args(dtype=torch.qint8), quant_min=0, quant_max=255)
    with pytest.raises(ConfigError, match=r"outside of torch\.quint8"):
        FakeQuantize(MinMaxObserver, quant_min=-1, quant_max=255)
    with pytest.raises(ConfigError, match="empty"):
        FakeQuantize(MinMaxObserver, quant_min=9, quant_max=3)


def test_fixed_qparams(oracle: Callable[..., Any]) -> None:
    ours = observe.default_fixed_qparams_range_neg1to1_fake_quant()
    theirs = oracle("default_fixed_qparams_range_neg1to1_fake_quant")
    for other in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        x = torch.randn(10) * 2
        assert torch.equal(other(x), theirs(x))
        assert other.scale is other.activation_post_process.scale
        assert [t.item() for t in other.calculate_qparams()] == [2 / 256, 128]
    ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("observer", [MinMaxObserver, PerChannelMinMaxObserver])
def test_fixed_qparams_need_their_observer(observer: Any) -> None:
    with pytest.raises(ConfigError, match="FixedQParamsObserver"):
        FixedQParamsFakeQuantize(observer)


def test_the_fused_kernel_needs_a_moving_average() -> None:
    with pytest.raises(ConfigError, match="moving averages"):
        FusedMovingAvgObsFakeQuantize(MinMaxObserver)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "observer", [MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver]
)
@pytest.mark.parametrize("first", [False, True])
def test_the_fused_state_survives_bad_values(bad: float, observer: Any, first: bool) -> None:
    """Also as the first batch, and then as if it had not been."""
    clean, dirty = (FusedMovingAvgObsFakeQuantize(observer) for _ in range(2))
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    if not first:
        clean(x), dirty(x)
    dirty(torch.full((3, 4), bad))
    dirty(torch.empty(0, 4))
    assert torch.equal(clean(y), dirty(y))
    for key, value in clean.state_dict().items():
        assert torch.equal(dirty.state_dict()[key], value), key


def test_one_bad_channel_does_not_stop_the_others() -> None:
    fake = FusedMovingAvgObsFakeQuantize(MovingAveragePerChannelMinMaxObserver)
    fake(torch.tensor([[0.0, float("nan")], [0.0, 2.55]]))
    fake(torch.tensor([[0.0, 2.55], [0.0, 2.55]]))
    assert fake.scale.tolist() == pytest.approx([0.01, 0.01])


def test_empty_inputs_pass() -> None:
    for fake in (FakeQuantize(), FusedMovingAvgObsFakeQuantize()):
        fake(torch.ones(2))
        assert fake(torch.empty(0, 3)).shape == (0, 3)
        assert fake.scale.item() == pytest.approx(1 / 255)


def test_merging_delegates_to_the_observers() -> None:
    factory = FakeQuantize.with_args(observer=PerChannelMinMaxObserver)
    whole, one, two = factory(), factory(), factory()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    whole(x), whole(y), one(x), two(y)
    merged = two.merge(one)
    for key, value in whole.state_dict().items():
        assert torch.equal(merged.state_dict()[key], value)
    with pytest.raises(ConfigError, match="order of the batches"):
        FusedMovingAvgObsFakeQuantize().merge(FusedMovingAvgObsFakeQuantize())
    with pytest.raises(ConfigError, match="cannot merge a MinMaxObserver"):
        one.merge(MinMaxObserver())


def test_a_users_observer_of_pytorch_works_inside() -> None:
    class Users(ao.MinMaxObserver):
        pass

    fake = FakeQuantize(observer=Users, quant_min=0, quant_max=127)
    fake(torch.tensor([0.0, 1.27]))
    assert fake.scale.item() == pytest.approx(0.01)


def test_switches_follow_the_device_and_the_state_dict() -> None:
    fake = FakeQuantize()
    fake.disable_observer()
    other = FakeQuantize()
    other.load_state_dict(fake.state_dict())
    assert other.observer_enabled.item() == 0
    assert other.observer_enabled.dtype == torch.uint8
    assert FusedMovingAvgObsFakeQuantize().observer_enabled.dtype == torch.long
