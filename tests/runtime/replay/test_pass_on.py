from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import backquant
from shortening import graph_of


class Chain(nn.Module):
    """Odd channels, groups, strides, inputs with zero points, ReLU6, and readers of plain integers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 10, 3, 2, 1)
        self.depthwise = nn.Conv2d(10, 10, 5, 2, 2, groups=10)
        self.point = nn.Conv2d(10, 7, 1)
        self.strided = nn.Conv2d(7, 9, 1, 2)
        self.grouped = nn.Conv2d(10, 6, 3, padding=1, groups=2)
        self.dilated = nn.Conv2d(6, 5, 3, padding=2, dilation=2)
        self.hard = nn.Conv2d(5, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu6(self.stem(x))
        y = self.strided(self.point(self.depthwise(x)))
        z = self.dilated(torch.relu(self.grouped(x)))
        z = nn.functional.hardswish(self.hard(z)) + z
        return torch.cat([y.mean((2, 3)), z.amax((2, 3)), x[:, ::2].mean((2, 3))], 1)


@pytest.fixture(scope="module")
def chain() -> Any:
    torch.manual_seed(0)
    model = Chain().eval()
    batches = [torch.randn(2, 3, 24, 24) for _ in range(2)]
    return backquant.quantize(model, batches[0], backend="x86", calibration=batches)


def warmed(model: Any, x: torch.Tensor) -> str:
    """The graph that is replayed for inputs like ``x``."""
    for _ in range(2):
        model(x)
    assert model.replays.programs >= 1, model.replays.refused
    latest = list(model.replays._found.values())[-1]
    return graph_of(latest.program)


# Sizes that give results of one size (25, 26) need objects of their own.
@pytest.mark.parametrize(
    "shape", [(2, 3, 24, 24), (1, 3, 25, 25), (1, 3, 26, 26), (3, 3, 40, 17), (0, 3, 24, 24)]
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_integers_are_those_of_the_graph(
    chain: Any, shape: tuple[int, ...], layout: torch.memory_format
) -> None:
    warmed(chain, torch.randn(shape).contiguous(memory_format=layout))
    for _ in range(2):
        x = torch.randn(shape).contiguous(memory_format=layout) * 2
        assert torch.equal(chain(x), chain.graph_module(x))


def test_quantized_tensors_are_passed_on() -> None:
    fresh = backquant.quantize(
        Chain().eval(), torch.randn(2, 3, 24, 24), calibration=[torch.randn(2, 3, 24, 24)]
    )
    graph = warmed(fresh, torch.randn(2, 3, 24, 24))
    assert graph.count("quantized::conv2d") == 5
    in_onednn = graph.count("onednn::qconv") + graph.count("onednn::qlinear")
    assert in_onednn == 2  # with the hardswish, and the result that is averaged in float
    made = graph.count("aten::_make_per_tensor_quantized_tensor")
    assert made <= 4, graph  # before the sum, which is float, of slices, of what cat joined


def test_a_loaded_weight_is_used(chain: Any) -> None:
    x = torch.randn(2, 3, 24, 24)
    warmed(chain, x)
    state = chain.state_dict()
    changed = {
        key: -value if key.endswith("weight") and value.dtype == torch.int8 else value
        for key, value in state.items()
    }
    before = chain(x)
    chain.load_state_dict(changed)
    warmed(chain, x)
    assert torch.equal(chain(x), chain.graph_module(x)) and not torch.equal(chain(x), before)
    chain.load_state_dict(state)


@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
def test_packed_weights_of_other_engines_are_replayed(backend: str) -> None:
    if backend not in torch.backends.quantized.supported_engines:
        pytest.skip(f"this build has no {backend}")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    batch = torch.randn(2, 3, 8, 8)
    quantized = backquant.quantize(model, batch, backend=backend, calibration=[batch])
    warmed(quantized, batch)
    assert torch.equal(quantized(batch), quantized.graph_module(batch))
