"""Leaf modules with a slot."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.ao.nn.quantized import FloatFunctional as OracleFunctional

from backquant.nn.quantizable import slots
from backquant.nn.quantized import FloatFunctional
from backquant.observe import MinMaxObserver


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_float_functional_is_the_oracles() -> None:
    ours, theirs = FloatFunctional(), OracleFunctional()
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    for name, arguments in [
        ("add", (x, y)),
        ("add_scalar", (x, 2.0)),
        ("mul", (x, y)),
        ("mul_scalar", (x, 2.0)),
        ("cat", ([x, y], 1)),
        ("add_relu", (x, y)),
        ("matmul", (x, y.t())),
    ]:
        assert torch.equal(getattr(ours, name)(*arguments), getattr(theirs, name)(*arguments))
    with pytest.raises(RuntimeError, match="has no forward"):
        ours(x)


def test_scalars_are_not_observed() -> None:
    functional = FloatFunctional()
    functional.activation_post_process = Doubled()
    x = torch.ones(1)
    assert functional.add(x, x).item() == 4
    assert functional.mul(x, x).item() == 2
    assert functional.add_scalar(x, 1.0).item() == 2
    assert functional.mul_scalar(x, 1.0).item() == 1


@pytest.mark.parametrize(
    "module", [slots.SlotLinear(3, 3), slots.SlotSigmoid(), slots.SlotTanh(), slots.SlotQuantStub()]
)
def test_the_output_goes_through_the_slot(module: slots.Slot) -> None:
    x = torch.randn(2, 3)
    plain = module(x)
    module.activation_post_process = Doubled()
    assert torch.equal(module(x), 2 * plain)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), 2 * plain)
    module.activation_post_process = None
    assert torch.equal(module(x), plain)


def test_names_in_the_state_dict() -> None:
    linear = slots.SlotLinear(1, 1)
    linear.activation_post_process = MinMaxObserver()
    names = [key for key in linear.state_dict() if key.startswith("activation_post_process.")]
    assert "activation_post_process.min_val" in names
