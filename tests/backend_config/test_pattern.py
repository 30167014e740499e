from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.ao.quantization.fx.pattern_utils import _sorted_patterns_dict
from torch.ao.quantization.utils import MatchAllNode as OracleMatchAllNode

from backquant.backend_config.pattern import (
    MatchAllNode,
    NormalPattern,
    PatternNode,
    from_reversed,
    normal_form,
    to_forward,
    to_reversed,
)
from backquant.errors import SpecError

OPERATORS = st.sampled_from(
    [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Linear, torch.add, operator.mul, len, "view", "relu"]
)
LITERALS = st.one_of(st.integers(-3, 3), st.none(), st.floats(0, 1), st.just(torch.float16))
LEAVES = st.one_of(OPERATORS, LITERALS, st.just(MatchAllNode))
ATTRIBUTES = st.tuples(st.just(getattr), st.sampled_from(["shape", "dtype"]))


def _calls(arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda op, args: (op, *args), OPERATORS, st.lists(arguments, min_size=1, max_size=3)
    )


TREES = st.one_of(OPERATORS, _calls(st.recursive(st.one_of(LEAVES, ATTRIBUTES), _calls)))
SEQUENCES = st.lists(OPERATORS, min_size=2, max_size=6).map(tuple)


@given(TREES)
def test_the_reversed_form_survives_the_normal_form(pattern: Any) -> None:
    normal = from_reversed(pattern)
    assert to_reversed(normal) == pattern
    assert from_reversed(to_reversed(normal)) == normal
    assert normal.size == _entries(pattern)


@given(SEQUENCES)
def test_the_forward_form_survives_and_equals_its_reversed_spelling(pattern: Any) -> None:
    normal = normal_form(pattern)
    assert normal.is_sequential
    assert to_forward(normal) == pattern
    again = from_reversed(to_reversed(normal))
    assert again == normal
    assert hash(again) == hash(normal)
    assert [node.op for node in normal.nodes] == list(pattern)


@given(SEQUENCES, SEQUENCES)
def test_different_sequences_have_different_normal_forms(one: Any, other: Any) -> None:
    assert (normal_form(one) == normal_form(other)) == (one == other)


@given(TREES)
def test_nodes_stand_in_dataflow_order(pattern: Any) -> None:
    normal = from_reversed(pattern)
    used = [i for n, node in enumerate(normal.nodes) for i in node.inputs or () if i < n]
    assert sorted(used) == list(range(len(normal.nodes) - 1))
    assert normal.anchor is normal.nodes[-1]


@given(st.lists(TREES, min_size=1, max_size=8))
def test_order_by_size_is_that_of_pytorch(patterns: list[Any]) -> None:
    oracle = _sorted_patterns_dict({p: i for i, p in enumerate(patterns)})
    ours = sorted(dict.fromkeys(patterns), key=lambda p: -from_reversed(p).size)
    assert list(oracle) == ours


def _entries(pattern: Any) -> int:
    return sum(map(_entries, pattern)) if isinstance(pattern, tuple) else 1


def test_three_in_a_row_become_pytorchs_nesting() -> None:
    forward = (nn.Conv2d, nn.BatchNorm2d, nn.ReLU)
    assert to_reversed(normal_form(forward)) == (nn.ReLU, (nn.BatchNorm2d, nn.Conv2d))


def test_a_flat_reversed_triple_is_two_arguments_not_a_sequence() -> None:
    flat = from_reversed((torch.add, nn.ReLU, nn.Conv2d))
    assert flat.anchor.inputs == (0, 1)
    assert not flat.is_sequential
    assert flat != from_reversed((torch.add, (nn.ReLU, nn.Conv2d)))


def test_argument_positions_count() -> None:
    left = from_reversed((torch.add, nn.Conv2d, MatchAllNode))
    right = from_reversed((torch.add, MatchAllNode, nn.Conv2d))
    assert left != right


def test_kinds() -> None:
    normal = from_reversed((operator.getitem, (torch.add, nn.ReLU, "view", MatchAllNode), 0))
    assert [node.kind for node in normal.nodes] == [
        "module",
        "method",
        "any",
        "function",
        "literal",
        "function",
    ]


def test_a_tuple_of_one_reversed_is_its_operator() -> None:
    assert from_reversed((nn.ReLU,)) == normal_form(nn.ReLU)


def test_pytorchs_match_all_node_is_ours() -> None:
    assert from_reversed((torch.add, OracleMatchAllNode, nn.ReLU)) == from_reversed(
        (torch.add, MatchAllNode, nn.ReLU)
    )


def test_a_getattr_names_its_attribute() -> None:
    normal = from_reversed((getattr, "shape"))
    assert str(normal) == "getattr(*, 'shape')"
    assert normal.size == 2
    assert from_reversed((getattr, MatchAllNode, "shape")) == normal
    nested = (getattr, nn.ReLU, "shape")
    assert to_reversed(from_reversed(nested)) == nested


def test_text() -> None:
    normal = from_reversed((operator.getitem, (nn.ReLU, (operator.add, MatchAllNode, "view")), 0))
    assert str(normal) == "operator.getitem(torch.nn.ReLU(operator.add(*, .view())), 0)"
    assert repr(normal_form(("view", torch.relu))) == "NormalPattern(torch.relu(.view()))"
    assert str(from_reversed(("view", MatchAllNode, -1))) == ".view(*, -1)"


@pytest.mark.parametrize(
    ("pattern", "message", "fix"),
    [
        ((), "a sequence has two or more operators, got ()", ""),
        (
            (nn.ReLU,),
            "a sequence has two or more operators, got (<class 'torch.nn.modules.activation.ReLU'>,)",
            "BackendPatternConfig(torch.nn.ReLU)",
        ),
        (
            (("view", "relu"), "add"),
            "a forward sequence holds single operators, got the tuple ('view', 'relu')",
            "BackendPatternConfig()._set_pattern_complex_format(...) takes nested tuples",
        ),
        (nn.ReLU(), "ReLU() cannot stand in a pattern", "pass the class: torch.nn.ReLU"),
        ([nn.ReLU], "[<class 'torch.nn.modules.activation.ReLU'>] cannot stand in a pattern", ""),
        ("", "'' cannot stand in a pattern", ""),
        (3, "a pattern ends in an operator, not in the value 3", ""),
        (("view", 3), "3 stands for an argument and takes none itself: (3, 'view')", None),
    ],
)
def test_normal_form_refuses(pattern: Any, message: str, fix: str | None) -> None:
    with pytest.raises(SpecError) as caught:
        normal_form(pattern)
    assert caught.value.what == message
    assert fix is None or caught.value.fix == fix
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ((), "an empty tuple is no pattern"),
        (((torch.add, "view"), "view"), "cannot stand in a pattern"),
        ((MatchAllNode, "view"), "stands for an argument and takes none itself"),
        ((torch.add, torch.zeros(1)), "cannot stand in a pattern"),
        ((getattr, 0), "a getattr pattern is"),
        ((getattr, "a", "b", "c"), "a getattr pattern is"),
    ],
)
def test_from_reversed_refuses(pattern: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        from_reversed(pattern)


def test_to_forward_refuses_a_tree() -> None:
    with pytest.raises(SpecError, match="is no sequence"):
        to_forward(from_reversed((torch.add, nn.ReLU, nn.Conv2d)))


def test_a_shared_node_has_no_nested_tuple() -> None:
    nodes = (PatternNode(nn.ReLU, None, "module"), PatternNode(torch.add, (0, 0), "function"))
    with pytest.raises(SpecError, match="uses one value twice"):
        to_reversed(NormalPattern(nodes))


@pytest.mark.parametrize(
    "nodes",
    [
        (),
        (PatternNode("a", None, "method"), PatternNode("b", None, "method")),  # first is unused
        (PatternNode("a", (0,), "method"),),  # uses itself
        (
            PatternNode("b", None, "method"),
            PatternNode("a", None, "method"),
            PatternNode("c", (1, 0), "method"),  # arguments not in depth-first order
        ),
    ],
)
def test_a_normal_pattern_checks_its_invariants(nodes: tuple[PatternNode, ...]) -> None:
    with pytest.raises(SpecError):
        NormalPattern(nodes)
