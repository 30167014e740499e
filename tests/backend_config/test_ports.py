from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backquant.backend_config import BackendPatternConfig, GraphPattern, Port
from backquant.backend_config.graph_pattern import NamedNode, NamedNodes, as_getter
from backquant.errors import SpecError

PATTERN = GraphPattern(
    ["x", "w", "y"],
    {"fc": (torch.nn.functional.linear, "x", "w"), "out": (torch.add, "fc", "y")},
)


def entry() -> BackendPatternConfig:
    return BackendPatternConfig(PATTERN)


BAD: dict[str, tuple[Any, str, str]] = {
    "nothing of that name": ({"wt": "weight"}, "the pattern has no 'wt' there", "ports"),
    "an inner node": ({"fc": "float"}, "the pattern has no 'fc' there", "ports"),
    "no role": ({"w": "wieght"}, "role cannot be 'wieght'", "ports['w'].role"),
    "no role at all": ({"w": Port}, "role cannot be", "ports['w'].role"),
    "an output is no weight": ({"out": "weight"}, "an output is no weight", "ports['out'].role"),
    "unknown key": ({"w": {"roel": "weight"}}, "Port has no field 'roel'", "ports['w'].roel"),
    "a later port": (
        {"x": Port(shares_with="y")},
        "'x' shares with 'y', which is no earlier port",
        "ports['x'].shares_with",
    ),
    "itself": (
        {"y": Port(shares_with="y")},
        "'y' shares with 'y', which is no earlier port",
        "ports['y'].shares_with",
    ),
    "a weight's observer": (
        {"w": "weight", "y": {"shares_with": "w"}},
        "'w' is observed as weight",
        "ports['y'].shares_with",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_ports(name: str) -> None:
    ports, message, where = BAD[name]
    with pytest.raises(SpecError) as caught:
        entry().set_ports(ports)
    assert message in str(caught.value)
    assert caught.value.where == where


def test_a_near_name_is_offered() -> None:
    with pytest.raises(SpecError) as caught:
        BackendPatternConfig(GraphPattern(["weight"], {"o": (torch.relu, "weight")})).set_ports(
            {"wieght": "weight"}
        )
    assert caught.value.fix == "did you mean 'weight'?"


def test_a_weight_shares_nothing() -> None:
    with pytest.raises(SpecError, match="a weight shares no observer"):
        Port("weight", shares_with="x")


def test_only_a_graph_has_ports() -> None:
    with pytest.raises(SpecError, match="only a GraphPattern has ports"):
        BackendPatternConfig(nn.Linear).set_ports({"x": "float"})


def test_ports_stand_in_the_order_of_the_pattern() -> None:
    given = entry().set_ports({"out": "float", "w": Port("weight"), "x": {"role": "activation"}})
    assert list(given.ports.items()) == [
        ("x", Port("activation")),
        ("w", Port("weight")),
        ("out", Port("float")),
    ]


def test_no_ports_resets() -> None:
    assert entry().set_ports({"w": "weight"}).set_ports({}) == entry()


def test_another_pattern_has_to_have_the_ports() -> None:
    with pytest.raises(SpecError, match="the pattern has no 'w' there"):
        entry().set_ports({"w": "weight"}).set_pattern(
            GraphPattern(["x"], {"out": (torch.relu, "x")})
        )


def test_getters_by_name() -> None:
    made = entry()._set_root_node_getter("fc")._set_extra_inputs_getter(["y", "w"])
    found = {"x": 1, "w": 2, "y": 3, "fc": 4, "out": 5}
    assert made._root_node_getter(found) == 4  # type: ignore[misc]
    assert made._extra_inputs_getter(found) == [3, 2]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("setter", "value", "message"),
    [
        ("_set_root_node_getter", "y", "the pattern has no 'y' there"),
        ("_set_root_node_getter", 3, "root_node_getter must be callable"),
        ("_set_extra_inputs_getter", ["fc"], "the pattern has no 'fc' there"),
        ("_set_extra_inputs_getter", "y", "extra_inputs_getter must be callable"),
    ],
)
def test_a_getter_by_a_wrong_name(setter: str, value: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        getattr(entry(), setter)(value)


def test_only_a_graph_has_nodes_with_names() -> None:
    with pytest.raises(SpecError, match="only a GraphPattern has nodes with names"):
        BackendPatternConfig(nn.Linear)._set_root_node_getter("fc")


def test_functions_stay_as_they_are() -> None:
    def getter(found: Any) -> Any:
        return found

    assert as_getter(getter, "root_node_getter", several=False) is getter
    assert as_getter(None, "root_node_getter", several=False) is None
    assert as_getter("fc", "root_node_getter", several=False) == NamedNode("fc")
    assert as_getter(["y"], "extra_inputs_getter", several=True) == NamedNodes(("y",))
