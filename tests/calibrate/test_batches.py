from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from backquant.calibrate.batches import check_set, first_batch
from backquant.errors import CalibrationError


def test_sets_are_iterables_of_batches() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(2, 1)))
    for batches in ([1], (1, 2), iter([1]), loader, {1, 2}, (x for x in [1]), range(2)):
        check_set(batches)
    for other in (
        torch.zeros(2),
        {"x": 1},
        "a.npz",
        b"a",
        3,
        None,
        TensorDataset(torch.zeros(2)),
        object(),
    ):
        with pytest.raises(CalibrationError):
            check_set(other)


def test_lists_stay_lists() -> None:
    batches = [1, 2, 3]
    first, again = first_batch(batches)
    assert first == 1 and again is batches


def test_iterators_lose_nothing_and_are_not_read_ahead() -> None:
    read: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(3):
            read.append(number)
            yield number

    first, again = first_batch(numbers())
    assert first == 0 and read == [0]
    assert list(again) == [0, 1, 2] and read == [0, 1, 2]


@pytest.mark.parametrize(
    "empty", [[], iter([]), (x for x in ()), DataLoader(TensorDataset(torch.zeros(0, 1)))]
)
def test_nothing_to_take(empty: object) -> None:
    with pytest.raises(CalibrationError, match="the calibration set is empty"):
        first_batch(empty)  # type: ignore[arg-type]
