from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

import backquant
from backquant.backend_config.import_paths import is_named


@pytest.mark.parametrize(
    ("found", "path"),
    [
        (nn.Conv2d, "torch.nn.Conv2d"),
        (torch.add, "torch.add"),
        (nn.functional.relu, "torch.nn.functional.relu"),
        (nn.functional.hardtanh_, "torch.nn.functional.hardtanh_"),
        (torch.Tensor.add, "torch.Tensor.add"),
        (torch.ops.aten.add.Tensor, "torch.ops.aten.add.Tensor"),
        (operator.getitem, "operator.getitem"),
        (torch.quint8, "torch.quint8"),
        (backquant.MinMaxObserver, "backquant.MinMaxObserver"),
        (len, "builtins.len"),
    ],
)
def test_what_descriptions_are_made_of(found: object, path: str) -> None:
    assert is_named(found, path)


@pytest.mark.parametrize(
    ("found", "path"),
    [
        (torch.load, "torch.load"),
        (torch._C._abort, "torch._C._abort"),
        (torch.from_file, "torch.from_file"),
        (torch.fx.GraphModule, "torch.fx.GraphModule"),
        (operator.methodcaller, "operator.methodcaller"),
        (operator.attrgetter, "operator.attrgetter"),
        (torch, "torch"),
        (backquant.load, "backquant.load"),
    ],
)
def test_what_they_are_not(found: object, path: str) -> None:
    assert not is_named(found, path)
