from __future__ import annotations

from typing import Any

import pytest
from torch import fx, nn

from backquant.errors import ConfigError, PassError
from backquant.graph import GraphPass, complaints, run_passes, verify


def graph() -> fx.GraphModule:
    return fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


def test_passes_run_in_order() -> None:
    seen: list[str] = []

    def step(name: str) -> GraphPass:
        return GraphPass(name, lambda gm: (seen.append(name), gm)[1])

    run_passes(graph(), [step("a"), step("b")])
    assert seen == ["a", "b"]


@pytest.mark.parametrize("side", ["requires", "ensures"])
def test_broken_contract_names_the_pass(side: str) -> None:
    step = GraphPass("tidy", lambda gm: gm, **{side: lambda gm: "something is missing"})
    with pytest.raises(PassError, match="something is missing") as caught:
        step(graph())
    assert caught.value.where == f"pass 'tidy', {side}"


def test_defects_are_named_and_requests_pass_through() -> None:
    def raising(error: Exception) -> Any:
        def run(gm: fx.GraphModule) -> fx.GraphModule:
            raise error

        return run

    with pytest.raises(PassError, match="KeyError") as caught:
        GraphPass("tidy", raising(KeyError("x")))(graph())
    assert caught.value.where == "pass 'tidy'"
    with pytest.raises(ConfigError):
        GraphPass("tidy", raising(ConfigError("no")))(graph())


def test_result_is_verified() -> None:
    def drop(gm: fx.GraphModule) -> fx.GraphModule:
        del gm._modules["0"]
        return gm

    with pytest.raises(PassError, match="missing module '0'") as caught:
        GraphPass("drop", drop)(graph())
    assert caught.value.where == "after pass 'drop'"


def test_each_complaint() -> None:
    gm = graph()
    first = next(iter(gm.graph.nodes))
    gm.graph.find_nodes(op="call_module")[0].append(first)
    assert any("before it is computed" in text for text in complaints(gm))

    gm = graph()
    gm.graph.find_nodes(op="call_module")[0].target = "nowhere"
    assert complaints(gm) == ["_0 calls the missing module 'nowhere'"]

    gm = graph()
    with gm.graph.inserting_before(gm.graph.find_nodes(op="output")[0]):
        gm.graph.create_node("get_attr", "nothing.there")
    assert complaints(gm) == ["nothing_there reads the missing attribute 'nothing.there'"]

    gm = graph()
    gm.graph.erase_node(gm.graph.find_nodes(op="output")[0])
    assert complaints(gm) == ["the graph has 0 outputs, or the output is not last"]

    gm = graph()
    verify(gm, after="nothing")
    foreign = fx.symbolic_trace(nn.ReLU()).graph.find_nodes(op="placeholder")[0]
    gm.graph.find_nodes(op="call_module")[0].args = (foreign,)
    with pytest.raises(PassError):
        verify(gm, after="mixing")
