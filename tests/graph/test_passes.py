from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

import backquant as bq
from backquant.convert import weights
from backquant.errors import ConfigError, PassError
from backquant.graph import complaints, run_pass, verify
from backquant.lower import LowerRule, engine_info, lower


def graph() -> fx.GraphModule:
    return fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("no"), IndexError(3)], ids=repr)
def test_defects_are_named(error: Exception) -> None:
    def tidy_graph() -> None:
        raise error

    with pytest.raises(PassError, match=type(error).__name__) as caught:
        run_pass(tidy_graph)
    assert caught.value.where == "pass 'tidy graph'" and caught.value.__cause__ is error


def test_what_was_asked_passes_through() -> None:
    def tidy(error: Exception) -> None:
        raise error

    with pytest.raises(ConfigError):
        run_pass(run_pass, tidy, ConfigError("no"))
    assert run_pass(int, "3") == 3


def test_a_step_of_conversion_and_a_rule_name_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a step stumbles over, no raw error leaves the public call."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(8, 4)

    def broken(*_: Any, **__: Any) -> Any:
        raise IndexError("out of range")

    with monkeypatch.context() as patched:
        patched.setattr(weights, "get_module", broken)
        with pytest.raises(PassError, match="IndexError") as caught:
            bq.quantize(model, (x,), backend="x86", calibration=[x])
        assert caught.value.where == "pass 'convert weighted modules'"
    rules = [LowerRule("broken relu", ((nn.ReLU,),), broken)]
    with pytest.raises(PassError, match="IndexError") as caught:
        lower(fx.symbolic_trace(model), rules, engine_info("x86"))
    assert caught.value.where == "pass 'lowering rule broken relu, at _1'"


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
