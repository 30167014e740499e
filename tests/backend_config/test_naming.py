from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backquant.backend_config import MatchAllNode
from backquant.backend_config.naming import functional_name, operator_name, short_name, spelled


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (nn.Conv2d, "torch.nn.Conv2d"),
        (nn.Sequential, "torch.nn.Sequential"),
        (F.relu, "torch.nn.functional.relu"),
        (torch.relu, "torch.relu"),
        (F.linear, "torch.nn.functional.linear"),
        (F.conv2d, "torch.conv2d"),
        (F.max_pool2d, "torch.nn.functional.max_pool2d"),
        (F.adaptive_avg_pool2d, "torch.nn.functional.adaptive_avg_pool2d"),
        (torch.add, "torch.add"),
        (operator.add, "operator.add"),
        (operator.getitem, "operator.getitem"),
        (torch.cat, "torch.cat"),
        (torch.ops.aten.add.Tensor, "torch.ops.aten.add.Tensor"),
        (torch.ops.aten.add, "torch.ops.aten.add"),
        (getattr, "getattr"),
        ("view", ".view()"),
        (0, "0"),
        (None, "None"),
        (torch.float32, "torch.float32"),
        (MatchAllNode, "backquant.backend_config.MatchAllNode"),
    ],
)
def test_operator_name(op: Any, name: str) -> None:
    assert operator_name(op) == name


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (nn.Conv2d, "Conv2d"),
        (F.relu, "F.relu"),
        (torch.add, "torch.add"),
        (operator.add, "operator.add"),
        (torch.ops.aten.add.Tensor, "aten.add.Tensor"),
        ("view", ".view()"),
        (0, "0"),
    ],
)
def test_short_name(op: Any, name: str) -> None:
    assert short_name(op) == name


def test_a_local_function_says_where_it_was_defined() -> None:
    def fuse() -> None: ...

    assert operator_name(fuse).endswith("test_naming." + fuse.__qualname__)


def test_names_resolve_back_to_the_operator() -> None:
    names = [n for n, value in vars(F).items() if callable(value) and not n.startswith("_")]
    for name in names:
        text = operator_name(vars(F)[name])
        if text.startswith("torch."):
            found = torch
            for part in text.split(".")[1:]:
                found = getattr(found, part)
            assert found is vars(F)[name], name


def test_functional_name_is_empty_for_others() -> None:
    assert functional_name(print) == ""


def test_spelled_nests_and_keeps_own_reprs() -> None:
    assert spelled((nn.ReLU, (operator.add, "view"))) == "(torch.nn.ReLU, (operator.add, 'view'))"
    assert spelled((nn.ReLU,)) == "(torch.nn.ReLU,)"
