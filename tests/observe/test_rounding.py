"""Against PyTorch's kernels: the same bits, forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backquant.observe import FakeQuantize, FusedMovingAvgObsFakeQuantize
from backquant.observe import MovingAveragePerChannelMinMaxObserver as PerChannel
from backquant.observe.fake_quantize import channel_ends, is_plain, rounded

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "with gaps": lambda x: x[:, ::2],
    "broadcast": lambda x: x[:1].expand(40, *x.shape[1:]),
}


def numbers(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(40, 12, 10, 12, generator=generator) * 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("zero_point", [0, 37, 255])
def test_per_tensor(layout: str, zero_point: int) -> None:
    mine, theirs = (LAYOUTS[layout](numbers()).detach().requires_grad_() for _ in range(2))
    scale, zero = torch.tensor([0.0173]), torch.tensor([zero_point])
    assert is_plain(mine)
    result = rounded(mine, scale, zero, None, (0, 255))
    wanted = torch.fake_quantize_per_tensor_affine(theirs, scale, zero, 0, 255)
    assert torch.equal(result, wanted) and result.stride() == wanted.stride()
    factor = torch.randn(result.shape)
    (result * factor).sum().backward()
    (wanted * factor).sum().backward()
    assert mine.grad is not None and torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("symmetric", [False, True])
def test_per_channel(layout: str, axis: int, symmetric: bool) -> None:
    mine, theirs = (LAYOUTS[layout](numbers()).detach().requires_grad_() for _ in range(2))
    channels = mine.size(axis)
    scale = torch.rand(channels) * 0.02 + 0.001
    zero = torch.zeros(channels) if symmetric else torch.randint(-100, 100, (channels,))
    zero = zero.to(torch.int32)
    result = rounded(mine, scale, zero, axis, (-128, 127))
    wanted = torch.fake_quantize_per_channel_affine(theirs, scale, zero, axis % 4, -128, 127)
    assert torch.equal(result, wanted) and result.stride() == wanted.stride()
    factor = torch.randn(result.shape)
    (result * factor).sum().backward()
    (wanted * factor).sum().backward()
    assert mine.grad is not None and torch.equal(mine.grad, theirs.grad)


def test_halves_and_ends() -> None:
    """Ties go to the even neighbour; what rounds to an end is inside, what lies beyond is not."""
    x = torch.arange(-1000, 1000).repeat(4) / 2
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    one, zero = torch.tensor([1.0]), torch.tensor([3])
    result = rounded(mine, one, zero, None, (-128, 127))
    wanted = torch.fake_quantize_per_tensor_affine(theirs, one, zero, -128, 127)
    assert torch.equal(result, wanted)
    result.sum().backward()
    wanted.sum().backward()
    assert torch.equal(mine.grad, theirs.grad)


def test_a_second_derivative() -> None:
    x = numbers().requires_grad_()
    squares = rounded(x, torch.tensor([0.1]), torch.tensor([0]), None, (-8, 7)) ** 2
    (grad,) = torch.autograd.grad(squares.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert second.unique().tolist() == [0.0, 2.0]


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(80, 80, dtype=torch.float64),
        torch.zeros(80, 80, dtype=torch.bfloat16),
        torch.zeros(80, 80, device="meta"),
        torch.zeros(4),
        torch.nn.parameter.Buffer(torch.zeros(80, 80)).as_subclass(type("Own", (Tensor,), {})),
    ],
)
def test_what_torch_rounds_itself(x: Tensor) -> None:
    assert not is_plain(x)


def test_torch_rounds_while_it_traces() -> None:
    seen = []
    x = torch.zeros(80, 80)
    torch.vmap(lambda row: seen.append(is_plain(row)) or row)(x.repeat(80, 1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing is deprecated
        torch.jit.trace(lambda t: seen.append(is_plain(t)) or t, x, check_trace=False)
    assert seen == [False, False]


@pytest.mark.parametrize("axis", [0, 2, -1])
def test_ends_of_channels(axis: int) -> None:
    x = numbers()
    rows = x.movedim(axis, 0).flatten(1)
    assert torch.equal(channel_ends(x, axis), torch.stack((rows.amin(1), rows.amax(1)), 1))
    assert channel_ends(torch.tensor([1.0, -2.0]), 0).tolist() == [[1, 1], [-2, -2]]


@pytest.mark.parametrize("ch_axis", [None, 0])
@pytest.mark.parametrize("enabled", [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_the_fused_module_is_pytorchs_kernel(ch_axis: int | None, enabled: tuple[int, int]) -> None:
    ours, kernel = (made(ch_axis) for _ in range(2))
    for seed in range(3):
        if seed == 2:
            for module in (ours, kernel):
                module.enable_observer(bool(enabled[0]))
                module.enable_fake_quant(bool(enabled[1]))
        x, y = numbers(seed).requires_grad_(), numbers(seed).requires_grad_()
        result = ours(x)
        wanted = kernel._fused(y, kernel.observer_enabled)
        assert torch.equal(result, wanted)
        (result * x).sum().backward()
        (wanted * y).sum().backward()
        assert torch.equal(x.grad, y.grad)
        for one, two in zip(ours.state_dict().items(), kernel.state_dict().items(), strict=True):
            assert one[0] == two[0] and torch.equal(one[1], two[1])


def made(ch_axis: int | None) -> FusedMovingAvgObsFakeQuantize:
    if ch_axis is None:
        return FusedMovingAvgObsFakeQuantize()
    module = FusedMovingAvgObsFakeQuantize(
        PerChannel, -128, 127, dtype=torch.qint8, qscheme=torch.per_channel_affine, ch_axis=ch_axis
    )
    module(numbers())  # the kernel by itself would resize the buffers
    return module


def test_values_that_are_not_finite() -> None:
    """The range stays as it was, and what is finite is rounded by it."""
    module = FakeQuantize(observer=made(0).activation_post_process.with_args(), quant_min=None)
    module(numbers())
    before = module.scale.clone()
    module.disable_observer()
    bad = numbers()
    bad[0, 0, 0, 0] = float("nan")
    result = module(bad)
    assert torch.equal(module.scale, before)
    assert torch.isfinite(result.flatten()[1:]).all()
