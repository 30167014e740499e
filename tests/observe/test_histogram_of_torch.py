"""A histogram of PyTorch is read as PyTorch reads it: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from backquant.observe import HistogramObserver
from backquant.observe.together import calculate_together

VALUES = {
    "normal": lambda: torch.randn(1000),
    "long tail": lambda: torch.randn(3000).exp(),
    "after a relu": lambda: torch.randn(2000).relu(),
    "cubes": lambda: torch.randn(200) ** 3,
    "an outlier": lambda: torch.cat([torch.randn(999), torch.tensor([50.0])]),
    "negative": lambda: -torch.rand(50),
    "a few integers": lambda: torch.randint(0, 9, (700,)).float(),
    "three": lambda: torch.randn(3),
    "one value": lambda: torch.full((4,), 2.0),
    "tiny": lambda: torch.randn(300) * 1e-8,
    "large": lambda: torch.randn(300) * 1e8,
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"reduce_range": True},
    {"dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric},
    {"bins": 256},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_qparams_are_torchs(
    name: str, settings: dict[str, Any], oracle: Callable[..., Any]
) -> None:
    torch.manual_seed(0)
    theirs, ours = oracle("HistogramObserver", **settings), HistogramObserver(**settings)
    for _ in range(2):
        theirs(VALUES[name]())
    ours.load_state_dict(theirs.state_dict())
    assert all(map(torch.equal, ours.calculate_qparams(), theirs.calculate_qparams()))
    assert calculate_together([ours]) == {}
