from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from backquant.observe import HistogramObserver, MinMaxObserver, together
from backquant.observe.together import calculate_together


def data(seed: int, size: int) -> Tensor:
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return [x, x.relu(), -x.relu(), x**3, (x * 4).round() / 4, x.exp(), x + 5][seed % 7]


def observers(sizes: list[int], **settings: object) -> list[HistogramObserver]:
    made = []
    for seed, size in enumerate(sizes):
        observer = HistogramObserver(**settings)
        observer(data(seed, size))
        made.append(observer)
    return made


SIZES = [2, 3, 10, 50, 200, 200, 500, 500, 500, 1000, 4000, 5000, 20_000, 200_000] * 3


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reduce_range": True},
        {"dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric},
        {"bins": 64, "quant_min": 0, "quant_max": 15},
    ],
)
def test_the_same_bits_as_one_by_one(settings: dict[str, object]) -> None:
    together, single = observers(SIZES, **settings), observers(SIZES, **settings)
    found = calculate_together(together)
    for one, other in zip(together, single, strict=True):
        scale, zero_point = found[id(one)]
        wanted = other.calculate_qparams()
        assert torch.equal(scale, wanted[0]) and torch.equal(zero_point, wanted[1])
        assert (scale.dtype, zero_point.dtype) == (wanted[0].dtype, wanted[1].dtype)
        assert (scale.shape, zero_point.shape) == ((1,), (1,))
        for (name, mine), theirs in zip(
            one.state_dict().items(), other.state_dict().values(), strict=True
        ):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), name


def test_it_does_not_matter_who_is_together() -> None:
    made = observers(SIZES)
    whole = calculate_together(copy.deepcopy(observer) for observer in made)
    for observer, wanted in zip(made, whole.values(), strict=True):
        found = calculate_together([observer])[id(observer)]
        assert tree_map(Tensor.item, found) == tree_map(Tensor.item, wanted)


def test_values_that_wait_beside_bins() -> None:
    together, single = observers(SIZES[:9]), observers(SIZES[:9])
    for several in (together, single):
        for seed, observer in enumerate(several):
            observer._settle()
            observer(data(seed + 3, 300))
    calculate_together(together)
    for one, other in zip(together, single, strict=True):
        assert torch.equal(one.bin_key, other.bin_key)
        assert torch.equal(one.bin_second, other.bin_second)


def test_tensors_are_their_own() -> None:
    one, other = observers([100, 100])
    found = calculate_together([one, other])
    assert one.bin_key.untyped_storage().nbytes() == one.bin_key.nbytes
    before = other.bin_count.clone()
    one.bin_count.zero_()
    assert torch.equal(other.bin_count, before)
    assert found[id(one)][0].item() > 0


def test_values_that_are_not_finite_stay_out() -> None:
    observer = HistogramObserver()
    observer(torch.tensor([math.nan, 1.0, -1.0, math.inf, -math.inf]))
    calculate_together([observer])
    assert observer.bin_count.tolist() == [1, 1]


def test_who_is_left_out() -> None:
    empty, single = HistogramObserver(), HistogramObserver()
    single(torch.tensor([1.0]))

    class Own(HistogramObserver):
        pass

    own, plain = Own(), MinMaxObserver()
    for observer in (own, plain):
        observer(torch.randn(100))
    assert calculate_together([empty, single, own, plain, torch.nn.ReLU()]) == {}
    assert calculate_together([]) == {}


def test_what_was_calculated_once_is_not_calculated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made, other = observers([100, 200, 300]), torch.nn.Identity()
    asked: list[int] = []

    def counted(some: Iterable[Any]) -> dict[int, Any]:
        some = list(some)
        asked.append(len(some))
        return calculate_together(some)

    monkeypatch.setattr(together, "calculate_together", counted)
    calculate = together.CalculatedOnce()
    first = calculate([*made[:2], other])
    again = calculate([*made, other])
    assert asked == [3, 1]
    assert first.keys() < again.keys() == {id(observer) for observer in made}
    assert all(again[key] is pair for key, pair in first.items())
