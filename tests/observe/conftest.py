"""The oracle (PyTorch's observers), and comparisons with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.ao.quantization as ao


@pytest.fixture(scope="session")
def oracle(quietly: Callable[..., Any]) -> Callable[..., Any]:
    """Make the observer or fake-quantizer that PyTorch has under a name."""
    return lambda name, **kwargs: quietly(getattr(ao, name), **kwargs)


@pytest.fixture(scope="session")
def assert_same_qparams() -> Callable[[Any, Any], None]:
    def check(ours: Any, theirs: Any) -> None:
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.dtype == other.dtype
            assert mine.shape == other.shape
            assert torch.equal(mine, other), (mine, other)

    return check


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
