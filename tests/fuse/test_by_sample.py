"""``backquant.fuse.taken_apart``: the same in float, with inputs of at most one."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

from backquant.fuse import part_name, scaled_by_sample
from backquant.graph import capture
from backquant.match.plan import BySample


def _normed(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    with torch.no_grad():
        for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
            tensor.uniform_(0.5, 2)
    return norm


CASES = {
    "linear": (nn.Sequential(nn.Linear(6, 4), nn.ReLU()), (3, 6)),
    "tokens": (nn.Sequential(nn.Linear(6, 4)), (3, 5, 6)),
    "no bias": (nn.Sequential(nn.Conv1d(2, 4, 3, bias=False)), (3, 2, 9)),
    "conv": (nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU()), (3, 2, 5, 5)),
    "norm": (nn.Sequential(nn.Conv2d(2, 4, 3), _normed(4), nn.ReLU()), (3, 2, 5, 5)),
    "norm, no bias": (nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), _normed(4)), (3, 2, 5, 5)),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(2, 4, 3, stride=2)), (3, 2, 4, 4)),
    "transposed, norm": (nn.Sequential(nn.ConvTranspose2d(2, 4, 3), _normed(4)), (3, 2, 4, 4)),
    "transposed, groups": (nn.Sequential(nn.ConvTranspose1d(4, 4, 3, groups=2)), (3, 4, 6)),
    "three axes": (nn.Sequential(nn.Conv3d(2, 4, 2)), (3, 2, 4, 4, 4)),
}


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gives_what_the_layer_gives(name: str, by_channel: bool) -> None:
    model, shape = CASES[name]
    channels = (0.01, 1.0, 3.0, 50.0) if by_channel else ()
    model.eval()
    x = torch.randn(shape) * torch.tensor([1e-4, 1.0, 1e3]).reshape(-1, *[1] * (len(shape) - 1))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    captured = capture(model)
    assert scaled_by_sample(captured, {"_0": BySample(len(shape), channels)}) == ("0",)

    seen = []
    captured.module.get_submodule("0").register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )
    torch.testing.assert_close(captured.module(x), model(x), rtol=1e-4, atol=1e-5)
    largest = seen[0].abs().flatten(1).amax(1)
    torch.testing.assert_close(largest, torch.ones(3))
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


PARTED = {
    "linear": (nn.Linear(7, 4), (3, 5, 7)),
    "conv": (nn.Conv2d(7, 4, 3), (3, 7, 5, 5)),
    "no bias": (nn.Conv1d(7, 4, 3, bias=False), (3, 7, 9)),
    "transposed": (nn.ConvTranspose1d(7, 4, 3, stride=2), (3, 7, 6)),
}


@pytest.mark.parametrize("channels", [(), (0.01, 1.0, 3.0, 50.0)])
@pytest.mark.parametrize("name", PARTED)
def test_parts_of_the_channels_are_scaled_by_themselves(
    name: str, channels: tuple[float, ...]
) -> None:
    layer, shape = PARTED[name]
    model = nn.Sequential(layer, nn.ReLU()).eval()
    captured = capture(model)
    assert scaled_by_sample(captured, {"_0": BySample(len(shape), channels, 3)}) == ("0",)
    seen = []
    for place in range(3):
        part = captured.module.get_submodule(part_name("0", place))
        part.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = torch.randn(shape) * torch.tensor([1e-4, 1.0, 1e3]).reshape(-1, *[1] * (len(shape) - 1))
    axis = -1 if name == "linear" else 1
    x *= torch.logspace(0, -3, 7).reshape(-1, *[1] * (len(shape) - 2) if axis == 1 else ())
    torch.testing.assert_close(captured.module(x), model(x), rtol=1e-4, atol=1e-5)
    assert [part.shape[axis] for part in seen] == [2, 2, 3]
    for part in seen:
        torch.testing.assert_close(part.abs().flatten(1).amax(1), torch.ones(3))
    assert captured.scopes["_0_part_1"].path == "0_part_1"
    alone = captured.module(x[:1, ...])
    torch.testing.assert_close(alone, model(x[:1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv1d(8, 4, 3, groups=2)),
        nn.Sequential(nn.Conv1d(8, 4, 3), nn.BatchNorm1d(4)),
    ],
)
def test_groups_and_layers_with_a_norm_are_not_divided(model: nn.Module) -> None:
    captured = capture(model.eval())
    scaled_by_sample(captured, {"_0": BySample(3, (), 2)})
    assert "0_part_1" not in dict(captured.module.named_modules())
    x = torch.randn(3, 8, 9)
    torch.testing.assert_close(captured.module(x), model(x), rtol=1e-4, atol=1e-5)


def test_samples_of_zeros_give_the_bias() -> None:
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    captured = capture(model)
    scaled_by_sample(captured, {"_0": BySample(2)})
    torch.testing.assert_close(captured.module(torch.zeros(2, 4)), model(torch.zeros(2, 4)))


def test_a_layer_that_is_called_twice_stays() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))

    captured = capture(Twice().eval())
    count = len(captured.module.graph.nodes)
    assert scaled_by_sample(captured, {"layer": BySample(2), "layer_1": BySample(2)}) == ()
    assert len(captured.module.graph.nodes) == count


def test_what_is_no_plain_layer_stays() -> None:
    captured = capture(nn.Sequential(nn.LSTM(2, 2)).eval())
    assert scaled_by_sample(captured, {"_0": BySample(3)}) == ()


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) @ self.k(x).mT


def test_layers_that_read_one_value_share_its_scale() -> None:
    model = _Heads().eval()
    captured = capture(model)
    assert scaled_by_sample(captured, {"q": BySample(3), "k": BySample(3)}) == ("q", "k")
    divisions = [n for n in captured.module.graph.nodes if n.target is operator.truediv]
    assert len(divisions) == 1
    x = torch.randn(3, 5, 4) * torch.tensor([1e-4, 1.0, 1e3]).reshape(3, 1, 1)
    torch.testing.assert_close(captured.module(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Conv1d(2, 4, 3), (2, 9)), (nn.Linear(6, 4), (3, 6))]
)
def test_less_axes_are_one_sample(layer: nn.Module, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(layer).eval()
    captured = capture(model)
    scaled_by_sample(captured, {"_0": BySample(len(shape) + 1)})
    x = torch.randn(shape)
    torch.testing.assert_close(captured.module(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_sample(value: float) -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3)).eval()
    captured = capture(model)
    scaled_by_sample(captured, {"_0": BySample(3)})
    x = torch.randn(3, 2, 9)
    x[1, 0, 4] = value
    found, wanted = captured.module(x), model(x)
    torch.testing.assert_close(found[[0, 2]], wanted[[0, 2]], rtol=1e-4, atol=1e-5)
    assert not found[1][~wanted[1].isfinite()].isfinite().any()
