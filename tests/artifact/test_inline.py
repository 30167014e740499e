from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

import backquant
from backquant import get_default_qconfig_mapping
from backquant.errors import ArtifactError
from backquant.runtime import QuantizedModel


def dropped(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    if p < 0.0 or p > 1.0:
        raise ValueError("p is a probability")
    if not training or p == 0.0:
        return x * 2
    return x * torch.rand(1)


def by_value(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


fx.wrap("dropped")
fx.wrap("by_value")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(dropped(self.fc(x), 0.5, self.training) + 1)


def test_a_wrapped_function_is_taken_apart_in_the_file(
    round_trip: Callable[..., QuantizedModel],
) -> None:
    x = torch.randn(3, 4)
    prepared = backquant.prepare_fx(Net().eval(), get_default_qconfig_mapping("x86"), x)
    prepared(x)
    model = backquant.convert_fx(prepared)
    before = [node.name for node in model.graph_module.graph.nodes]
    assert "dropped" in before
    loaded = round_trip(model)
    assert torch.equal(loaded(x), model(x))
    assert [node.name for node in model.graph_module.graph.nodes] == before


def test_one_that_branches_on_values_is_refused_by_name(
    round_trip: Callable[..., QuantizedModel],
) -> None:
    class Branching(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return by_value(self.fc(x))

    x = torch.randn(3, 4)
    model = backquant.quantize(Branching().eval(), x, calibration=[x], capture="trace")
    with pytest.raises(ArtifactError, match="by_value"):
        round_trip(model)
