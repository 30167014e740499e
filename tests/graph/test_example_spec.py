"""Example inputs as data: values that belong together stay, pictures are drawn like the ones seen."""

from __future__ import annotations

import json
import math
from collections import namedtuple

import torch

from backquant.graph.example import ExampleSpec


def made(*inputs: object) -> tuple[object, ...]:
    spec = ExampleSpec.of(inputs)
    assert spec is not None
    return ExampleSpec(**json.loads(json.dumps(spec.to_dict()))).arguments()[0]


def test_integers_truth_values_and_whole_floats_come_back() -> None:
    mask = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1) > 0, -math.inf)
    given = (
        torch.tensor([0, 3, 5, 9]),
        torch.tensor([[True, False]]),
        mask,
        torch.full((2,), torch.finfo(torch.float32).min),
        torch.tensor(7),
        torch.tensor([2.0, 1.0], dtype=torch.float16),
    )
    for found, wanted in zip(made(*given), given, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def test_floats_are_drawn_within_what_was_seen() -> None:
    given = torch.rand(4, 1000) * 2 + 5
    [found] = made(given)
    assert not torch.equal(found, given)
    assert found.min() >= given.min() and found.max() <= given.max()
    assert abs(found.mean() - given.mean()) < 0.1
    assert "values" not in ExampleSpec.of(given).args[0]


def test_large_tensors_keep_their_range_only() -> None:
    given = torch.randint(3, 90, (200, 100))
    [found] = made(given)
    assert found.shape == given.shape
    assert int(found.min()) >= 3 and int(found.max()) < 90


def test_what_has_no_values_is_made() -> None:
    found = made(torch.zeros(0, 4), torch.full((2,), math.nan), torch.zeros(2, dtype=torch.cfloat))
    assert [tuple(value.shape) for value in found] == [(0, 4), (2,), (2,)]


def test_named_tuples_come_back_with_their_names() -> None:
    """A model that reads ``pair.first`` is exported without its class."""
    pair = namedtuple("pair", ["first", "_second"], rename=True)(torch.ones(2, 3), [torch.ones(1)])
    spec = ExampleSpec.of((pair, 2))
    assert spec is not None
    again = ExampleSpec(**json.loads(json.dumps(spec.to_dict())))
    (made, two), _ = again.arguments()
    assert made.first.shape == (2, 3) and made[1][0].shape == (1,) and two == 2
    crafted = ExampleSpec([{"named": {"__import__('os')": 1, "def": 2}}], {})  # of a file
    assert tuple(crafted.arguments()[0][0]) == (1, 2)
