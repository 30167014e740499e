"""Files give tensors: what else a model returns becomes one, or is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import fx, nn

from backquant.graph.plain_arguments import with_plain_outputs


class Pair(NamedTuple):
    first: Any
    second: Any


class Net(nn.Module):
    def __init__(self, give: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.give = give

    def forward(self, x: torch.Tensor) -> Any:
        return self.give(x)


def plain(give: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    module = fx.symbolic_trace(Net(give))
    with_plain_outputs(module, (x,), {})
    return module(x)


def test_named_tuples_are_dicts_and_those_of_torch_tuples() -> None:
    x = torch.tensor([[1.0, 3.0]])
    pair, best = plain(lambda x: (Pair(x + 1, Pair(x, 2)), torch.max(x, 1)), x)
    assert list(pair) == ["first", "second"] and pair["second"]["first"] is x
    assert pair["second"]["second"].item() == 2
    assert type(best) is tuple and [t.item() for t in best] == [3.0, 1]


def test_the_place_of_everything_stays() -> None:
    found = plain(
        lambda x: [x, "ner", None, 0.1, True, (7, x.dtype), x.shape[0] * 0.5], torch.ones(3)
    )
    assert found[1] is None and found[2] is None and found[5][1] is None
    numbers = [found[3], found[4], found[5][0], found[6]]
    assert [number.item() for number in numbers] == [0.1, True, 7, 1.5]
    assert [number.dtype for number in numbers] == [
        torch.float64,
        torch.bool,
        torch.int64,
        torch.float64,
    ]


@pytest.mark.parametrize("give", [lambda x: x, lambda x: {"a": [x, x.shape[0]]}], ids=["x", "size"])
def test_tensors_and_sizes_stay_as_they_are(give: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(2, 3)
    assert plain(give, x) == give(x) if give(x) is not x else plain(give, x) is x


def test_no_argument_is_changed() -> None:
    x = torch.ones(2)
    module = fx.symbolic_trace(Net(lambda x: (x.add_(1), x.sum() * 2)))
    with_plain_outputs(module, (x,), {})
    assert x.tolist() == [1, 1]
