"""Weights packed once: used where nothing can tell, and given up where something refuses the order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backquant import QConfigMapping, get_default_qconfig_mapping, prepare_fx
from backquant.calibrate import calibrate, site_observers
from backquant.calibrate.packed import PackedConvolutions
from backquant.nn.quantized.reference import Conv2d
from backquant.observe import MinMaxObserver, default_weight_observer
from backquant.qconfig import QConfig

WEIGHT: dict[str, Any] = {
    "qscheme": torch.per_channel_symmetric,
    "dtype": torch.qint8,
    "axis": 0,
    "scale": torch.full((8,), 0.01),
    "zero_point": torch.zeros(8, dtype=torch.int64),
}


class Viewed(nn.Module):
    """``view`` refuses a map of more than one pixel in channels-last order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.fc = nn.Linear(8 * 36, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(x).view(x.size(0), -1))


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(self.conv(x), (8,), (1,))


class Own(nn.Conv2d):
    pass


def images(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 8, 8, generator=generator) for _ in range(count)]


def prepared(model: nn.Module, mapping: QConfigMapping | None = None) -> Any:
    mapping = mapping or get_default_qconfig_mapping("x86")
    return prepare_fx(model.eval(), mapping, images()[0])


def packed_in(model: Any) -> int:
    return len(PackedConvolutions.of(model, site_observers(model).values())._calls)


def ranges(model: Any) -> torch.Tensor:
    found = site_observers(model).values()
    return torch.tensor([[float(each.min_val), float(each.max_val)] for each in found])


def by_hand(model: Any) -> torch.Tensor:
    """What the observers measure when the model is called."""
    with torch.no_grad():
        for batch in images():
            model(batch)
    return ranges(model)


@pytest.mark.parametrize("groups", [1, 4])
def test_the_ranges_are_those_of_the_model_as_it_is(groups: int) -> None:
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, groups=groups, bias=False),
    )
    model = prepared(layers)
    expected = by_hand(prepared(layers))
    assert packed_in(model) == 2
    calibrate(model, images())
    torch.testing.assert_close(ranges(model), expected, rtol=1e-5, atol=1e-5)
    assert "forward" not in vars(model.get_submodule("0"))


def test_other_observers_see_the_bits_that_the_model_gives() -> None:
    qconfig = QConfig(MinMaxObserver, default_weight_observer)
    mapping = QConfigMapping().set_global(qconfig)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    model, same = prepared(layers, mapping), prepared(layers, mapping)
    assert packed_in(model) == 0
    calibrate(model, images())
    assert torch.equal(ranges(model), by_hand(same))


def test_where_the_order_is_refused_the_batch_is_run_again_without() -> None:
    net = Viewed()
    model, same = prepared(net), prepared(net)
    assert packed_in(model) == 1
    report = calibrate(model, images())
    assert (report.batches, report.unseen) == (3, ())
    assert torch.equal(ranges(model), by_hand(same))


@pytest.mark.parametrize("model", [Strided(), nn.Sequential(Own(3, 8, 3))])
def test_nothing_is_packed_where_the_order_might_be_seen(model: nn.Module) -> None:
    assert packed_in(prepared(model)) == 0


@pytest.mark.parametrize(
    "convolution",
    [nn.Conv2d(3, 8, 3, padding="same"), nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")],
)
def test_convolutions_that_pad_by_themselves_stay(convolution: nn.Module) -> None:
    assert packed_in(prepared(nn.Sequential(convolution))) == 0


def test_an_image_without_batch_is_computed_as_ever() -> None:
    layer = nn.Conv2d(3, 8, 3)
    image = images()[0][0]
    packed = PackedConvolutions([layer])
    with torch.no_grad():
        expected = layer(image)
        with packed.used():
            assert torch.equal(layer(image), expected)


def test_a_forward_of_ones_own_stays() -> None:
    layer = nn.Conv2d(3, 8, 3)
    own = layer.forward
    vars(layer)["forward"] = own
    model = prepared(nn.Sequential(layer))
    assert packed_in(model) == 0
    calibrate(model, images())
    assert "forward" in vars(layer)


def test_a_reference_model_is_packed_whatever_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Conv2d.from_float(nn.Conv2d(3, 8, 3), WEIGHT)
    model = torch.fx.symbolic_trace(nn.Sequential(layer))
    packed = PackedConvolutions.of_reference(model)
    image = images()[0]
    with torch.no_grad():
        expected = model(image)
        monkeypatch.setattr(type(layer), "forward", None)  # with packed weights it is not called
        torch.testing.assert_close(packed.calling(lambda: model(image)), expected)
    assert not PackedConvolutions.of_reference(nn.Sequential(layer))


def test_what_refuses_the_order_is_called_again_without() -> None:
    model = torch.fx.symbolic_trace(Viewed().eval())
    model.conv = Conv2d.from_float(model.conv, WEIGHT)  # type: ignore[arg-type]
    packed = PackedConvolutions.of_reference(model)
    assert packed
    with torch.no_grad():
        assert torch.equal(packed.calling(lambda: model(images()[0])), model(images()[0]))
    assert not packed
