from __future__ import annotations

import operator

import pytest
import torch

from backquant.backend_config import (
    ForwardFuser,
    MatchAllNode,
    NormalPattern,
    PatternNode,
    ReversedFuser,
    SequentialFuser,
    from_reversed,
)
from backquant.backend_config.import_paths import Resolver, SpellingError
from backquant.backend_config.spelling import (
    callable_data,
    callable_from,
    pattern_data,
    pattern_from,
)
from backquant.errors import SpecError


@pytest.mark.parametrize(
    ("pattern", "reversed_form", "data"),
    [
        (torch.nn.Linear, False, "torch.nn.Linear"),
        ("view", False, ".view"),
        ((torch.nn.Conv2d, "relu"), False, ["torch.nn.Conv2d", ".relu"]),
        (torch.add, True, {"reversed": "torch.add"}),
        (
            (operator.getitem, torch.ops.aten.max_pool2d_with_indices.default, 0),
            True,
            {
                "reversed": [
                    "operator.getitem",
                    "torch.ops.aten.max_pool2d_with_indices.default",
                    0,
                ]
            },
        ),
        (
            (torch.nn.ReLU, (torch.add, MatchAllNode, (torch.nn.BatchNorm2d, torch.nn.Conv2d))),
            True,
            {
                "reversed": [
                    "torch.nn.ReLU",
                    ["torch.add", "MatchAllNode", ["torch.nn.BatchNorm2d", "torch.nn.Conv2d"]],
                ]
            },
        ),
        ((getattr, "shape"), True, {"reversed": ["builtins.getattr", ".shape"]}),
        (
            ("to", torch.nn.ReLU, torch.float16),
            True,
            {"reversed": [".to", "torch.nn.ReLU", "torch.float16"]},
        ),
    ],
)
def test_patterns(pattern, reversed_form, data):
    assert pattern_data(pattern, reversed_form) == data
    assert pattern_from(data, Resolver()) == (pattern, reversed_form)


def test_a_graph_with_a_shared_node_and_every_kind_of_literal():
    any_node = from_reversed(MatchAllNode).nodes[0]
    pattern = NormalPattern(
        (
            any_node,
            PatternNode("shape", None, "literal"),
            PatternNode(getattr, (0, 1), "function"),
            PatternNode(3, None, "literal"),
            PatternNode(torch.float16, None, "literal"),
            PatternNode("view", (0, 2, 3, 4), "method"),
            PatternNode(torch.add, (5, 5), "function"),
        )
    )
    data = pattern_data(pattern)
    assert data["nodes"][1] == {"literal": "shape"}
    assert data["nodes"][4] == {"constant": "torch.float16"}
    assert data["nodes"][6] == {"op": "torch.add", "inputs": [5, 5]}
    assert pattern_from(data, Resolver()) == (pattern, False)


def test_a_malformed_graph():
    with pytest.raises(SpecError):
        pattern_from({"nodes": [{"op": "torch.add", "inputs": [3]}]}, Resolver())


def test_foreign_match_all_nodes_are_read_as_ours():
    foreign = type("MatchAllNode", (), {})
    assert pattern_data((torch.add, foreign, "x"), True) == {
        "reversed": ["torch.add", "MatchAllNode", ".x"]
    }


@pytest.mark.parametrize(
    ("function", "data"),
    [
        (torch.nn.functional.relu, "torch.nn.functional.relu"),
        (SequentialFuser(torch.nn.Sequential), {"sequential": "torch.nn.Sequential"}),
        (
            SequentialFuser(torch.nn.Sequential, arity=3),
            {"sequential": "torch.nn.Sequential", "arity": 3},
        ),
        (
            ReversedFuser(SequentialFuser(torch.nn.Sequential)),
            {"reversed_arguments": {"sequential": "torch.nn.Sequential"}},
        ),
        (ForwardFuser(torch.add), {"forward_arguments": "torch.add"}),
    ],
)
def test_callables(function, data):
    assert callable_data(function) == data
    assert callable_from(data, Resolver()) == function


def test_observer_factories():
    from backquant.observe import FakeQuantize, FixedQParamsObserver

    factory = FakeQuantize.with_args(
        observer=FixedQParamsObserver.with_args(scale=1 / 256, zero_point=0, dtype=torch.quint8),
        quant_min=0,
    )
    data = callable_data(factory)
    assert data == {
        "factory": "backquant.observe.FakeQuantize",
        "with_args": {
            "observer": {
                "factory": "backquant.observe.FixedQParamsObserver",
                "with_args": {"scale": 1 / 256, "zero_point": 0, "dtype": "torch.quint8"},
            },
            "quant_min": 0,
        },
    }
    assert callable_from(data, Resolver()) == factory


def test_factories_that_cannot_be_stored():
    from backquant.observe import MinMaxObserver

    with pytest.raises(SpellingError, match="made at call time"):
        callable_data(MinMaxObserver.with_callable_args(quant_min=lambda: 0))
    with pytest.raises(SpellingError, match="cannot be told from an import path"):
        callable_data(MinMaxObserver.with_args(name="x"))


def test_only_classes_with_with_args_are_factories():
    with pytest.raises(SpellingError, match="no class with with_args"):
        callable_from({"factory": "torch.nn.Linear", "with_args": {}}, Resolver())
