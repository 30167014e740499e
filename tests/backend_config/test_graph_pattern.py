from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from backquant.backend_config import (
    AnyOrder,
    BackendConfig,
    BackendPatternConfig,
    GraphPattern,
    MatchAllNode,
    Port,
    Value,
    from_reversed,
    get_fuser_method_mapping,
    get_pattern_to_dtype_configs,
    normal_form,
)
from backquant.backend_config.describe import describe_entry
from backquant.backend_config.graph_pattern import GraphNode
from backquant.errors import SpecError


def swish(name: str = "") -> GraphPattern:
    nodes = {"gate": (torch.sigmoid, "x"), "out": (AnyOrder(torch.mul), "x", "gate")}
    return GraphPattern(["x"], nodes, name=name)


BAD: dict[str, tuple[Any, Any, str]] = {
    "no node": (["x"], {}, "nodes is a dict of one or more operators"),
    "a list of nodes": (["x"], [torch.relu], "nodes is a dict of one or more operators"),
    "inputs as one text": ("x", {"out": (torch.relu, "x")}, "inputs are several names, got 'x'"),
    "a name with a dot": (["x.y"], {"out": torch.relu}, "a name is made of letters, digits and _"),
    "a name twice": (["x"], {"x": (torch.relu, "x")}, "the name 'x' stands twice"),
    "unknown": (["gate"], {"out": (torch.relu, "gte")}, "'out' reads 'gte', which is neither"),
    "a cycle": (
        ["x"],
        {"a": (torch.add, "x", "b"), "b": (torch.relu, "a")},
        "'a' reads 'b', which does not come before it: a pattern has no cycle",
    ),
    "itself": (["x"], {"a": (torch.add, "x", "a")}, "'a' reads 'a', which does not come before"),
    "two outputs": (
        ["x"],
        {"a": (torch.relu, "x"), "b": (torch.tanh, "x")},
        "two outputs, 'a' and 'b': a pattern computes one value",
    ),
    "two outputs, the first of two operators": (
        ["x"],
        {"a": (torch.relu, "x"), "c": (torch.relu, "a"), "b": (torch.tanh, "x")},
        "two outputs, 'c' and 'b'",
    ),
    "an input that nothing reads": (
        ["x", "y"],
        {"out": (torch.relu, "x")},
        "nothing reads the input 'y'",
    ),
    "no operator": ([], {"out": 3}, "a node is an operator, got 3"),
    "anything": ([], {"out": MatchAllNode}, "a node is an operator, got"),
    "an empty tuple": ([], {"out": ()}, "an empty tuple is no operator"),
    "an operator as argument": (
        ["x"],
        {"out": (torch.add, "x", torch.relu)},
        "torch.relu stands among the arguments",
    ),
    "a bare order": ([], {"out": AnyOrder(torch.add)}, "AnyOrder is for operators with two"),
    "an order of three": (
        ["x"],
        {"out": (AnyOrder(torch.add), "x", "x", "x")},
        "AnyOrder is for operators with two",
    ),
    "too many orders": (
        ["x"],
        {f"n{i}": (AnyOrder(torch.add), f"n{i - 1}" if i else "x", "x") for i in range(7)},
        "more than 6 operators take their arguments in any order",
    ),
    "an object": ([], {"out": object()}, "pattern"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_pattern(name: str) -> None:
    inputs, nodes, message = BAD[name]
    with pytest.raises(SpecError) as caught:
        GraphPattern(inputs, nodes)
    assert message in str(caught.value)


def test_a_near_name_is_offered() -> None:
    with pytest.raises(SpecError) as caught:
        GraphPattern(["gate"], {"out": (torch.relu, "gte")})
    assert caught.value.where == "pattern.nodes.out"
    assert caught.value.fix == "did you mean 'gate'?"


def test_a_name_is_a_text() -> None:
    with pytest.raises(SpecError, match="a name is a text, got 3"):
        GraphPattern([], {"out": torch.relu}, name=3)  # type: ignore[arg-type]


def test_parts() -> None:
    pattern = swish()
    assert pattern.inputs == ("x",)
    assert pattern.nodes == (
        GraphNode("gate", torch.sigmoid, ("x",)),
        GraphNode("out", torch.mul, ("x", "gate"), any_order=True),
    )
    assert (pattern.output, pattern.ports, pattern.operators) == (
        "out",
        ("x", "out"),
        ("gate", "out"),
    )


def test_normal_form_of_a_tree_is_that_of_the_nested_tuple() -> None:
    pattern = GraphPattern(
        ["y"],
        {
            "conv": nn.Conv2d,
            "bn": (nn.BatchNorm2d, "conv"),
            "sum": (operator.add, "bn", "y"),
            "relu": (nn.ReLU, "sum"),
        },
    )
    nested = (nn.ReLU, (operator.add, (nn.BatchNorm2d, nn.Conv2d), MatchAllNode))
    assert pattern.normal == from_reversed(nested) == normal_form(pattern)
    assert hash(pattern.normal) == hash(from_reversed(nested))


def test_names_do_not_count_in_the_normal_form_and_do_in_equality() -> None:
    one = GraphPattern(["x"], {"out": (torch.relu, "x")})
    two = GraphPattern(["y"], {"out": (torch.relu, "y")})
    assert one != two
    assert one.normal == two.normal
    assert one == GraphPattern(["x"], {"out": (torch.relu, "x")})
    assert len({one, two, GraphPattern(["x"], {"out": (torch.relu, "x")})}) == 2
    backend = BackendConfig().set_backend_pattern_config(BackendPatternConfig(one))
    backend.set_backend_pattern_config(BackendPatternConfig(two))
    assert len(backend.configs) == 1  # the same pattern again keeps the place


def test_order_of_writing_of_independent_nodes_does_not_count() -> None:
    a, b = (torch.relu, "x"), (torch.tanh, "x")
    one = GraphPattern(["x"], {"a": a, "b": b, "out": (torch.add, "a", "b")})
    two = GraphPattern(["x"], {"b": b, "a": a, "out": (torch.add, "a", "b")})
    assert one.normal == two.normal


def test_literals_and_texts() -> None:
    pattern = GraphPattern(
        ["x"], {"out": (torch.nn.functional.gelu, "x", Value("tanh"), None, MatchAllNode, 0.5)}
    )
    assert [node.kind for node in pattern.normal.nodes] == [
        "any",
        "literal",
        "literal",
        "any",
        "literal",
        "function",
    ]
    assert pattern.names == ("x", "", "", "", "", "out")
    assert "Value('tanh')" in repr(pattern)


@pytest.mark.parametrize(
    "pattern", [swish(), swish("swish"), GraphPattern([], {"out": "relu"})], ids=repr
)
def test_repr_is_code_and_copies_are_equal(pattern: GraphPattern) -> None:
    names = {"GraphPattern": GraphPattern, "AnyOrder": AnyOrder, "torch": torch}
    assert eval(repr(pattern), names) == pattern
    assert copy.deepcopy(pattern) == pattern
    assert pickle.loads(pickle.dumps(pattern)) == pattern


def test_text() -> None:
    assert str(swish()) == "torch.mul(a, torch.sigmoid(a); any order)"
    assert str(swish("swish")) == "swish"
    entry = BackendPatternConfig(swish("swish"))
    assert describe_entry(entry) == "swish = torch.mul(a, torch.sigmoid(a); any order)"


def test_an_entry_round_trips_through_its_dict() -> None:
    entry = (
        BackendPatternConfig(swish())
        .set_ports({"x": "activation", "out": Port(shares_with="x")})
        ._set_root_node_getter("gate")
        ._set_extra_inputs_getter(["x"])
    )
    assert BackendPatternConfig.from_dict(entry.to_dict()) == entry
    assert entry != BackendPatternConfig(swish())
    assert "ports={'x': Port('activation')" in repr(entry)


def test_pytorchs_key_of_a_graph_is_the_graph() -> None:
    backend = BackendConfig().set_backend_pattern_configs(
        [BackendPatternConfig(swish()), BackendPatternConfig((nn.Linear, nn.ReLU))]
    )
    assert list(get_pattern_to_dtype_configs(backend)) == [swish(), (nn.ReLU, nn.Linear)]


def test_a_fuser_of_a_graph_is_in_the_mapping() -> None:
    def fuse(is_qat: bool, **parts: Any) -> nn.Module:
        return nn.Sequential(*parts.values())

    entry = BackendPatternConfig(swish()).set_fuser_method(fuse)
    backend = BackendConfig().set_backend_pattern_config(entry)
    assert get_fuser_method_mapping(backend) == {swish(): fuse}


def test_a_graph_is_no_nested_tuple() -> None:
    with pytest.raises(SpecError, match="a GraphPattern is no nested tuple"):
        BackendPatternConfig()._set_pattern_complex_format(swish())
