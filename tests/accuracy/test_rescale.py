"""Steps that scale channels, and ranges from histograms, against the formulas of their papers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import backquant
from backquant.accuracy.recipes.bench import Bench
from backquant.accuracy.recipes.draft import Draft
from backquant.accuracy.recipes.ranges import divergence, entropy_range, percentile_range
from backquant.accuracy.recipes.recipe import STEPS
from backquant.accuracy.recipes.rescale import Bridge, bridges_of, equalized, products_of, smoothed
from backquant.api.flow import Flow, Options
from backquant.lower.kernels.boundary import multiply
from backquant.observe.histogram_grid import Spread
from backquant.prepare import unobserved


class Paths(nn.Module):
    """Norm to two linears, through a product; convolution to grouped convolution, over PReLU and a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gate = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(16, 32)
        self.down, self.read_twice = nn.Linear(32, 16), nn.Linear(16, 16)
        self.conv1, self.bn, self.act = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.PReLU(8)
        self.conv2, self.conv3 = nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(x)
        y = self.read_twice(self.down(torch.relu(self.up(y)) * torch.sigmoid(self.gate(y))))
        z = self.act(self.bn(self.conv1(x[:, None, None].expand(-1, 1, 12, -1))))
        z = self.conv2(nn.functional.max_pool2d(z, 2))
        return y + torch.sin(y), self.conv3(z)


@pytest.fixture(scope="module", params=["trace", "export"])
def prepared(request: pytest.FixtureRequest) -> tuple[Draft, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Paths().eval()
    with torch.no_grad():
        model.norm.weight.copy_(3 ** torch.randn(16))
        model.conv1.weight.mul_((3 ** torch.randn(8)).reshape(-1, 1, 1, 1))
    data = [torch.randn(8, 16) for _ in range(4)]
    ready = Flow(Options("x86", capture=request.param)).calibrated(model, None, data)
    return Draft(ready.prepared, ready.conversion), data


def test_channels_are_found_on_the_graph(prepared: tuple[Draft, list[torch.Tensor]]) -> None:
    found = {
        bridge.source: [layer.path for layer in bridge.readers]
        for bridge in bridges_of(prepared[0].twin())
    }
    assert found == {
        "norm": ["up", "gate"],
        "up": ["down"],
        "down": ["read_twice"],
        "conv1": ["conv2"],
        "conv2": ["conv3"],
    }


@pytest.mark.parametrize("step", ["equalization", "smoothquant", "awq"])
def test_the_float_model_computes_the_same(
    prepared: tuple[Draft, list[torch.Tensor]], step: str
) -> None:
    draft, data = prepared
    bench = Bench(draft, data)
    with torch.no_grad():
        changes: list[Any] = list(STEPS[step](draft, bench))
        changed = draft.changed(change for together in changes for change in together)
        wanted, found = (unobserved(each.prepared)(data[0]) for each in (draft, changed))
    assert len(changes) >= 3
    for one, two in zip(wanted, found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4 * float(one.abs().max()))
    before = bench.loss(draft)
    after = bench.kept(draft, changes, bench.losses(draft))[1].total
    assert after <= before
    if step != "equalization":  # which looks at no data, and hurts here as a whole
        assert bench.loss(changed) < 0.95 * before and after < 0.95 * before


class Post(nn.Module):
    """A norm that linear layers and a sum read, as in BERT: its channels cannot be scaled in its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(32, 128)
        self.up, self.down, self.last = nn.Linear(128, 128), nn.Linear(128, 256), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(x)
        h = nn.functional.gelu(self.up(torch.sigmoid(self.q(y)) * torch.sigmoid(self.k(y))))
        return torch.softmax(self.down(h), -1), y + torch.tanh(self.last(torch.sin(x)))


@pytest.fixture(scope="module", params=["trace", "export"])
def post(request: pytest.FixtureRequest) -> tuple[nn.Module, str, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Post().eval()
    with torch.no_grad():
        model.norm.weight[3] = 60.0
        model.q.weight[:, 3] /= 60.0
        model.k.weight[:, 3] /= 60.0
        model.up.weight[5] *= 60.0
        model.down.weight[:, 5] /= 60.0
    return model, request.param, [torch.randn(96, 32) for _ in range(4)]


def test_channels_of_which_few_values_are_known_get_no_product(
    post: tuple[nn.Module, str, list[torch.Tensor]],
) -> None:
    model, capture, data = post
    few = [batch[:8] for batch in data]
    ready = Flow(Options("x86", capture=capture)).calibrated(model, None, few)
    draft = Draft(ready.prepared, ready.conversion)
    with torch.no_grad():
        assert list(STEPS["products"](draft, Bench(draft, few))) == []


def test_a_product_scales_what_a_sum_reads_too(
    post: tuple[nn.Module, str, list[torch.Tensor]], tmp_path: Any
) -> None:
    model, capture, data = post
    ready = Flow(Options("x86", capture=capture)).calibrated(model, None, data)
    draft = Draft(ready.prepared, ready.conversion)
    found = {bridge.values[0]: bridge for bridge in products_of(draft.twin())}
    [norm, behind] = found.values()  # not what 32 outputs read
    assert [layer.path for layer in norm.readers] == ["q", "k"] and not norm.parts
    assert [layer.path for layer in behind.readers] == ["down"] and behind.parts
    bench = Bench(draft, data)
    with torch.no_grad():
        changes: list[Any] = list(STEPS["products"](draft, bench))
        changed = draft.changed(change for together in changes for change in together)
        wanted, made = (unobserved(each.prepared)(data[0]) for each in (draft, changed))
    assert len(changes) == 2
    for one, two in zip(wanted, made, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert bench.loss(changed) < 0.6 * bench.loss(draft)
    assert not list(products_of(changed.twin()))  # once
    options: dict[str, Any] = {"calibration": data, "slower": "keep", "capture": capture}
    plain = backquant.quantize(model, data[0], **options)
    better = backquant.quantize(model, data[0], recipe=["products"], **options)
    assert len(better.kernels) == len(plain.kernels)
    levels = [backquant.compare(model, each, data).sqnr for each in (plain, better)]
    assert levels[1] > levels[0] + 2.5
    places = [node for node in better.graph_module.graph.nodes if node.target is multiply]
    assert len(places) == 1  # in place behind a kernel; what others read is not changed
    put_in = [row for row in better.report.rows if any(r.rule == "recipe" for r in row.reasons)]
    assert len(put_in) == 2
    backquant.save(better, tmp_path / "m.bq")
    for one, two in zip(backquant.load(tmp_path / "m.bq")(data[0]), better(data[0]), strict=True):
        assert torch.equal(one, two)


def test_equalization_gives_both_sides_one_range(
    prepared: tuple[Draft, list[torch.Tensor]],
) -> None:
    """Equation 11 of the paper, whose fixed point is equal ranges on both sides of each channel."""
    draft, data = prepared
    with torch.no_grad():
        changes: list[Any] = list(STEPS["equalization"](draft, Bench(draft, data)))
        changed = draft.changed(change for together in changes for change in together)
    pairs = [bridge for bridge in bridges_of(changed.twin()) if bridge.layer is not None]
    assert len(pairs) == 4
    for bridge in pairs:
        made, read = _ranges(bridge)
        torch.testing.assert_close(made, read, rtol=1e-2, atol=1e-6)


def _ranges(bridge: Bridge) -> tuple[torch.Tensor, torch.Tensor]:
    assert bridge.layer is not None
    made = bridge.layer.weight.abs().flatten(1).amax(1)
    [reader] = bridge.readers
    if reader.groups > 1:
        return made, reader.weight.abs().flatten(1).amax(1)
    return made, reader.weight.abs().movedim(1, 0).flatten(1).amax(1)


def test_equation_11_by_hand() -> None:
    first, second = nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[8.0], [1.0]]))
        second.weight.copy_(torch.tensor([[2.0, 4.0]]))
    ready = Flow(Options("x86")).calibrated(
        nn.Sequential(first, nn.ReLU(), second).eval(), None, [torch.ones(2, 1)]
    )
    found = list(bridges_of(Draft(ready.prepared, ready.conversion).twin()))
    torch.testing.assert_close(equalized(found)[0], torch.tensor([2.0, 0.5]))


def test_equation_4_of_smoothquant() -> None:
    """The example of figure 5 of the paper: activations of (2, 16, 2, 9), weights of (2, 1, 2, 1)."""
    factor = smoothed(torch.tensor([2.0, 16, 2, 9]), torch.tensor([2.0, 1, 2, 1]), 0.5)
    torch.testing.assert_close(factor, torch.tensor([1.0, 4, 1, 3]))


def test_percentiles_are_those_of_the_values() -> None:
    points = np.arange(-500.0, 501.0)
    found = percentile_range(Spread(points, points, np.ones(1001)), 99.0)
    assert found == pytest.approx((np.percentile(points, 0.5), np.percentile(points, 99.5)), abs=1)


def test_the_least_divergence_is_found() -> None:
    """A far value of little weight is cut off; without it nothing is; and by hand on eight counts."""
    edges = np.linspace(0, 1, 1025)
    bulk = np.linspace(2000.0, 1.0, 1024)
    near = Spread(edges[:-1], edges[1:], bulk)
    assert entropy_range(near, 256) == (0.0, pytest.approx(1.0, abs=0.1))
    far = Spread(np.append(edges[:-1], 8.0), np.append(edges[1:], 8.0), np.append(bulk, 1.0))
    low, high = entropy_range(far, 64)
    assert low == 0.0 and 0.9 < high < 1.3
    counts = np.array([1.0, 0, 2, 3, 5, 3, 1, 7])  # the example of the talk's slide on merging
    merged = np.array([1.0, 0, 2.5, 2.5, 4, 4, 4, 4])
    merged[:4] = [2, 0, 2, 2]
    p, q = counts / counts.sum(), merged / merged.sum()
    wanted = sum(a * np.log(a / b) for a, b in zip(p, q, strict=True) if a)
    assert divergence(counts, 8, 2) == pytest.approx(wanted)
