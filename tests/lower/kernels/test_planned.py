"""Kernel modules by the library, beside the same modules by oneDNN."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.lower.kernels import elementwise, images, norm, planned, pooling
from backquant.lower.kernels.conv import ConvConfig, OnednnConv
from backquant.lower.kernels.conv_add import ConvAddConfig, OnednnConvAdd
from backquant.lower.kernels.linear import LinearConfig, OnednnLinear
from backquant.lower.kernels.norm import BatchNorm, BatchNormConfig
from backquant.lower.kernels.packed import WeightTensors
from kernel_audit.check import check

pytestmark = pytest.mark.usefixtures("native_library")
STEPS = (1, 1), (1, 1), (1, 1)
NORM = ("weight", "bias", "mean", "var")


def tensors(*shape: int) -> WeightTensors:
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, shape, dtype=torch.int8)
    zeros = torch.zeros(shape[0], dtype=torch.int64)
    return WeightTensors(weight, torch.rand(shape[0]) / 100, zeros, torch.randn(shape[0]))


def conv(groups: int = 1, post_op: str = "relu") -> OnednnConv:
    config = ConvConfig(*STEPS, groups, 0.05, 9, 0.8, 3, torch.uint8, post_op)
    return OnednnConv(config, tensors(48, 48 // groups, 3, 3))


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("family", ["conv", "conv_add", "linear"])
@pytest.mark.parametrize("seed", range(8))
def test_within_one_step_of_the_reference_model(family: str, seed: int) -> None:
    """In every layout; recorded, loaded and plainly called to the same bits."""
    assert [str(finding) for finding in check(family, seed, "x86").findings] == []


@pytest.mark.parametrize("groups", [1, 3, 4, 6, 12, 48])
@pytest.mark.parametrize("post_op", ["none", "relu", "swish", "hardswish"])
def test_the_integers_are_those_of_onednn(
    groups: int, post_op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, x = (
        conv(groups, post_op),
        bytes_of(2, 48, 29, 31) // 2,
    )  # without VNNI oneDNN saturates at 8 bits
    found = kernel(x)
    assert kernel.name.startswith(
        "backquant.depthwise" if groups == 48 else "backquant.convolution"
    )
    monkeypatch.setattr(planned, "is_here", lambda: False)
    other = conv(groups, post_op)
    assert other.name.startswith("onednn.qconv2d_pointwise")
    off = (found.int() - other(x).int()).abs()
    assert off.max() <= 1 and (off > 0).float().mean() < 1e-3


def test_a_batch_gives_what_its_images_give() -> None:
    kernel, x = conv(), bytes_of(5, 48, 12, 13)
    together = kernel(x)
    assert torch.equal(together, torch.cat([kernel(image) for image in x.split(1)]))
    assert torch.equal(together[0], kernel(x[0]))
    assert kernel(x[:0]).shape == (0, 48, 12, 13)


def test_more_than_the_cache_holds() -> None:
    """Several groups of pixels, for each of which the weights of all blocks are read again."""
    config = ConvConfig(*STEPS, 1, 0.05, 9, 0.8, 3, torch.uint8)
    kernel, x = OnednnConv(config, tensors(144, 48, 3, 3)), bytes_of(5, 48, 60, 60)
    assert torch.equal(kernel(x), torch.cat([kernel(image) for image in x.split(1)]))


def test_lines_are_images_of_one_line() -> None:
    config = ConvConfig((2,), (1,), (1,), 1, 0.05, 9, 1.0, 0, torch.float32)
    kernel, x = OnednnConv(config, tensors(20, 12, 3)), bytes_of(2, 12, 33)
    made = nn.functional.conv1d(x.double() - 9, kernel.weight.double(), None, 2, 1)
    scale = (kernel.weight_scale.double() * 0.05).view(-1, 1)
    assert kernel.bias is not None
    torch.testing.assert_close(
        kernel(x).double(), made * scale + kernel.bias.double().view(-1, 1), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_decide_nothing(threads: int) -> None:
    cases = [(conv(groups), (3, 48, 40, 40)) for groups in (1, 4, 6, 48)]
    for kernel, shape in cases:
        x = bytes_of(*shape)
        expected = kernel(x)
        try:
            torch.set_num_threads(threads)
            assert torch.equal(kernel(x), expected)
        finally:
            torch.set_num_threads(1)


def test_eight_threads_at_once() -> None:
    """Kernels with other zero points, other sizes and no plan yet, at the same time."""
    other = ConvConfig(*STEPS, 1, 0.05, 200, 0.8, 3, torch.uint8)
    kernels = [conv(), conv(48), OnednnConv(other, tensors(16, 48, 3, 3))]
    inputs = [bytes_of(1, 48, n, 50 - n) for n in range(8, 40, 4)]
    expected = [copy.deepcopy(kernel)(x) for x in inputs for kernel in kernels]

    def run(_: int) -> bool:
        found = [kernel(x) for x in inputs for kernel in kernels]
        return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(32)))
    assert all(len(kernel._planned.tensors) == 1 for kernel in kernels)


def test_many_shapes_share_one_plan() -> None:
    kernel = conv()
    for n in range(3, 40):
        kernel(bytes_of(1, 48, n, n + 1))
    assert len(list(kernel.packed_tensors())) == 1


def test_new_weights_are_read() -> None:
    kernel, x = conv(), bytes_of(1, 48, 9, 9)
    before = kernel(x)
    state = {name: value.clone() for name, value in kernel.state_dict().items()}
    state["weight"] = -state["weight"]
    kernel.load_state_dict(state)
    assert not torch.equal(kernel(x), before)
    again = pickle.loads(pickle.dumps(kernel))
    assert not again._planned.tensors
    assert torch.equal(again(x), kernel(x))


def test_what_the_library_lacks_runs_as_before() -> None:
    grouped = conv(groups=16)  # of three channels
    assert grouped.name.startswith("onednn.") and grouped(bytes_of(1, 48, 9, 9)).shape[1] == 48
    add = ConvAddConfig(*STEPS, 1, 0.05, 9, 0.03, 7, 0.8, 3, relu=True)
    kernel = OnednnConvAdd(add, tensors(48, 48, 3, 3))
    assert kernel.name == "backquant.convolution(add, relu)"
    x = bytes_of(1, 48, 9, 9)
    spread = kernel(x, bytes_of(1, 48, 1, 1).expand(1, 48, 9, 9))
    assert spread.shape == kernel(x, bytes_of(1, 1, 1, 9)).shape  # broadcast: oneDNN's
    linear = OnednnLinear(LinearConfig(0.05, 9, 0.8, 3, torch.uint8), tensors(7, 5))
    assert linear.name == "backquant.linear"
    assert linear(bytes_of(2, 0, 5)).shape == (2, 0, 7)


def test_batch_norms_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    config = BatchNormConfig(2, 1e-5, True, 0.05, 120, 0.03, 9)
    kernel = BatchNorm(config, {name: torch.rand(70) + 0.5 for name in NORM})
    x = bytes_of(2, 70, 9, 8)
    found = kernel(x)
    assert kernel.name == "backquant.batch_norm2d_relu"
    assert [part.numel() for part in kernel.packed_tensors()] == [2 * 86]
    again = pickle.loads(pickle.dumps(kernel))
    assert not list(again.packed_tensors()) and torch.equal(again(x), found)
    state = {name: value.clone() for name, value in kernel.state_dict().items()}
    kernel.load_state_dict({**state, "weight": -state["weight"]})
    assert not torch.equal(kernel(x), found)
    kernel.load_state_dict(state)
    monkeypatch.setattr(norm, "is_here", lambda: False)
    assert kernel.name == "quantized.batch_norm2d_relu"
    off = (found.int() - kernel(x).int()).abs()
    assert off.max() <= 1 and (off > 0).float().mean() < 1e-2  # ties


@pytest.mark.parametrize("function", [elementwise.mul, elementwise.mul_relu])
@pytest.mark.parametrize("first", [True, False])
def test_gates_are_those_of_torch(
    function: Any, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, gate = (bytes_of(2, 70, 9, 8), 0.0513, 120), (bytes_of(2, 70, 1, 1), 0.0391, 3)
    pair = (*x, *gate) if first else (*gate, *x)
    found = function(*pair, 0.0617, 100)
    monkeypatch.setattr(images, "is_here", lambda: False)
    off = (found.int() - function(*pair, 0.0617, 100).int()).abs()
    assert off.max() <= 1 and (off > 0).float().mean() < 1e-2
    # one number for all channels is no gate
    assert function(*x, bytes_of(2, 1, 1, 1), 1.0, 0, 9.0, 0).shape == x[0].shape


def test_means_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = bytes_of(2, 70, 9, 7)
    exact = x.double().mean((2, 3))
    found = pooling.adaptive_avg_pool2d(x, 0.1, 3, (1, 1))
    assert found.shape == (2, 70, 1, 1) and (found.flatten(1) - exact).abs().max() <= 0.5 + 1e-4
    assert torch.equal(pooling.mean(x, 0.1, 3, [-1, -2], False), found.flatten(1))
    assert torch.equal(pooling.mean(x, 0.1, 3, [2, 3], True), found)
    monkeypatch.setattr(images, "is_here", lambda: False)
    assert (pooling.adaptive_avg_pool2d(x, 0.1, 3, (1, 1)).int() - found.int()).abs().max() <= 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(16, 40, 1)
        self.depthwise = nn.Conv2d(40, 40, 3, padding=1, groups=40)
        self.project = nn.Conv2d(40, 16, 1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.depthwise(torch.nn.functional.hardswish(self.expand(x))))
        return self.head((x + self.project(y)).mean((2, 3)))


def test_a_model_says_what_runs_and_gives_the_same_bits(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 16, 14, 14)
    quantized = backquant.quantize(Block().eval(), x, backend="x86", calibration=[x])
    names = " ".join(use.kernel for use in quantized.kernels)
    for name in ("backquant.convolution", "backquant.depthwise", "backquant.linear"):
        assert name in names
    with torch.no_grad():
        first = quantized(x)
        assert all(torch.equal(quantized(x), first) for _ in range(3))
        assert quantized.replays is not None and quantized.replays.programs == 1
        path = f"{tmp_path}/model.bq"
        backquant.save(quantized, path)
        loaded = backquant.load(path)
        assert torch.equal(loaded(x), first)
        monkeypatch.setattr(planned, "is_here", lambda: False)
        plain = backquant.load(path)
        assert (plain(x) - first).abs().max() <= 0.05 * first.abs().max()
    assert "onednn.qlinear_pointwise" in plain.audit().kernels
