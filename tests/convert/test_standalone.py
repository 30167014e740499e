"""More through ``convert_fx``, beside PyTorch's: tests/api/custom/test_standalone.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from backquant.convert import convert_to_reference, reference_state
from backquant.dtypes import QParams
from backquant.graph import set_module
from backquant.match import MatchKind
from backquant.prepare import prepared_state
from backquant.qconfig import PrepareCustomConfig

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, y):
        return self.fc(x) + y


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.pair = nn.Identity()

    def forward(self, x):
        return self.pair(self.first(x))


@pytest.fixture
def prepared(flow):
    """A prepared module in the place of a call, as a parent holds it."""
    custom = PrepareCustomConfig().set_input_quantized_indexes([1])
    custom.set_output_quantized_indexes([0])
    inner = flow.prepare(Pair().eval(), custom=custom)
    outer = flow.prepare(Outer().eval())
    call = next(node for node in outer.graph.nodes if node.target == "pair")
    call.args, call.kwargs = (call.args[0],), {"y": call.args[0]}
    set_module(outer, "pair", inner)
    outer.recompile()
    outer(X)
    return outer


def test_only_what_is_named_arrives_quantized(prepared):
    """One value, in float at one place and quantized at the other."""
    reference = convert_to_reference(prepared)
    call = next(node for node in reference.graph.nodes if node.target == "pair")
    float_arg, quantized_arg = call.args[0], call.kwargs["y"]
    assert float_arg.args[0] is quantized_arg
    inner = reference_state(reference.pair)
    assert list(inner.inputs) == [1] and list(inner.outputs) == [0]
    assert isinstance(inner.inputs[1], QParams)
    assert inner.inputs[1].literals == tuple(float_arg.args[1:])
    (after,) = call.users
    assert tuple(after.args[1:]) == inner.outputs[0].literals
    assert torch.isfinite(reference(X)).all()


def test_quantized_tensors_tell_their_qparams(prepared):
    reference = convert_to_reference(prepared, dialect="quantized_tensor")
    inner = reference_state(reference.pair)
    assert inner.inputs == {1: None} and inner.outputs == {0: None}
    plain = convert_to_reference(prepared)
    torch.testing.assert_close(reference(X / 2), plain(X / 2))  # within what was measured


def test_the_prepared_module_stays(prepared):
    inner = prepared.pair
    convert_to_reference(prepared)
    assert prepared.pair is inner
    kinds = {match.kind for match in prepared_state(inner).plan.matches}
    assert kinds == {MatchKind.PATTERN}
