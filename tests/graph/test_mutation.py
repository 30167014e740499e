"""Which calls change their first argument, and which results share its memory."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from backquant.graph.in_place import changes_argument, is_view

aten = torch.ops.aten


def _call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    make = graph.call_method if isinstance(target, str) else graph.call_function
    return make(target, (graph.placeholder("x"), *args), kwargs)


def _target_name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


@pytest.mark.parametrize(
    "node",
    [
        _call("relu_"),
        _call(torch.relu_),
        _call(F.hardtanh_),
        _call(operator.iadd, 1),
        _call(operator.ixor, 1),
        _call(F.relu, True),
        _call(F.relu6, inplace=True),
        _call(aten.relu_.default),
    ],
    ids=_target_name,
)
def test_calls_in_place(node: fx.Node) -> None:
    assert changes_argument(node)


@pytest.mark.parametrize(
    "node",
    [
        _call("relu"),
        _call("__and__", 1),
        _call("__no_tensor_method_"),
        _call(F.relu),
        _call(F.relu, inplace=False),
        _call(operator.add, 1),
        _call(operator.setitem, 0, 1),  # gives None
        _call(aten.relu.default),
        _call(aten.add.out, 1, out=None),  # changes another one
    ],
    ids=_target_name,
)
def test_calls_that_change_nothing_of_their_own(node: fx.Node) -> None:
    assert not changes_argument(node)


def test_modules_say_it_themselves() -> None:
    node = fx.Graph().call_module("act", ())
    assert changes_argument(node, nn.ReLU(inplace=True))
    assert not changes_argument(node, nn.ReLU()) and not changes_argument(node)
    assert is_view(node, nn.Flatten()) and not is_view(node, nn.ReLU())


def test_views() -> None:
    views = [_call("view", -1), _call(torch.transpose, 0, 1), _call(aten.view.default, [-1])]
    copies = [_call("clone"), _call(torch.relu), _call(aten.clone.default)]
    assert all(map(is_view, views)) and not any(map(is_view, copies))
