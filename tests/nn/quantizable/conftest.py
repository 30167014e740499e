"""A QConfig of PyTorch's min/max observers, understood by both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def minmax_qconfig() -> Any:
    from torch.ao.quantization import MinMaxObserver, QConfig

    weight = MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
    return QConfig(activation=MinMaxObserver, weight=weight)
