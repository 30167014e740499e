"""Functions with a gradient of their own: it is what a prepared model trains with."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import fx, nn

import backquant
from backquant.graph import capture
from backquant.graph.modes import (
    CustomGradient,
    capture_for_training,
    inline_custom_gradients,
    kept_custom_gradients,
)


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x, times):
        return torch.round(x * times) / times

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Halves(torch.autograd.Function):
    """Two results, and the context apart from ``forward``."""

    @staticmethod
    def forward(x):
        return x[..., :2] * 1, x[..., 2:] * 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, one, two):
        return torch.cat((two, one), -1)  # not its derivative: only this function knows it


def _later(x, times):
    return Rounded.apply(x, times)


# bound before anything is captured (mambapy's scan); torch 2.15's cannot be known again then
rounded = (
    Rounded.apply if isinstance(vars(torch.autograd.Function)["apply"], classmethod) else _later
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        one, two = Halves.apply(rounded(self.one(x), 4.0))
        return self.two(torch.cat((one, two), -1))


class AsksForSizes(Net):
    def forward(self, x):
        *_, width = x.shape
        return super().forward(x) * width


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [each.grad.clone() for each in model.parameters()]


@pytest.mark.filterwarnings("ignore")  # what stays float, and how it was traced
@pytest.mark.parametrize("kind", [Net, AsksForSizes])
def test_a_prepared_model_has_their_gradients(kind: type[nn.Module], tmp_path) -> None:
    """A trace of what they compute has none (rounding), or others; with the example inputs it crashed."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 4)
    mapping = backquant.get_default_qat_qconfig_mapping("x86")
    prepared = backquant.prepare_qat_fx(model, mapping, x, backend_config="x86")
    prepared(x)
    prepared.apply(backquant.disable_fake_quant)
    expected = gradients(model, x)
    assert all(each.abs().sum() > 0 for each in expected)
    for each in (prepared, copy.deepcopy(prepared)):
        for one, two in zip(gradients(each, x), expected, strict=True):
            torch.testing.assert_close(one, two)
    prepared.apply(backquant.enable_fake_quant)
    quantized = backquant.convert_fx(prepared.eval())
    with torch.no_grad():
        expected = prepared(x)
        assert (quantized(x) - expected).square().sum() < 0.01 * expected.square().sum()
        backquant.save(quantized, tmp_path / "net.bq")  # no class of the user is in it
        assert torch.equal(backquant.load(tmp_path / "net.bq")(x), quantized(x))


def test_in_other_captures_they_are_what_they_compute() -> None:
    x = torch.randn(3, 4)
    for model, example in ((Net(), None), (AsksForSizes(), x)):
        module = capture(model, example_inputs=example).module
        calls = [node for node in module.graph.nodes if node.op == "call_module"]
        assert [str(node.target) for node in calls] == ["one", "two"]
        module.recompile()
        assert torch.equal(module(x), model(x))


def test_other_threads_and_later_calls_are_left_alone() -> None:
    found = []

    def traced_there() -> None:
        found.append(fx.symbolic_trace(lambda x: rounded(x, 4.0)).graph)

    apply = vars(torch.autograd.Function)["apply"]
    with kept_custom_gradients():
        thread = threading.Thread(target=traced_there)
        thread.start()
        thread.join()
        x = torch.randn(3, requires_grad=True)
        rounded(x, 4.0).sum().backward()
    assert x.grad.tolist() == [1, 1, 1]
    assert not any(node.op == "call_module" for node in found[0].nodes)
    assert vars(torch.autograd.Function)["apply"] is apply
    assert "apply" not in vars(torch.autograd.Function.__mro__[1])


def test_a_function_that_looks_at_numbers_stays_a_call() -> None:
    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2 if x.sum() > 0 else x

    class One(nn.Module):
        def forward(self, x):
            return Looks.apply(x)

    module = capture_for_training(One(), capture).captured.module
    inline_custom_gradients(module)
    [called] = [node for node in module.graph.nodes if node.op == "call_module"]
    assert isinstance(module.get_submodule(str(called.target)), CustomGradient)
    module.recompile()
    assert module(torch.ones(2)).tolist() == [2, 2]
