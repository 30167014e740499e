"""Wrong state dicts are refused by key, and nothing of them is loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.cases import CASES, pair
from tests.snapshots import compare as snapshot
from torch import nn

import backquant as bq
from backquant.errors import UsageError

State = dict[str, Any]


@pytest.fixture(scope="module")
def model() -> bq.QuantizedModel:
    return pair(CASES["residual"]).ours(calibrated=True)


def _set(key: str, value: Any) -> Any:
    def change(state: State) -> State:
        return {**state, key: value(state[key]) if callable(value) else value}

    return change


def _without(*keys: str) -> Any:
    return lambda state: {key: value for key, value in state.items() if key not in keys}


WRONG = {
    "a missing weight": _without("conv.weight"),
    "a missing scale": _without("more.scale", "_scale_0", "_scale_1", "_scale_2"),
    "an unexpected key": _set("conv2.weight", torch.ones(1)),
    "another shape": _set("more.weight", lambda t: t[:2]),
    "NaN in a bias": _set("conv.bias", lambda t: t * float("nan")),
    "infinity in a bias": _set("conv.bias", lambda t: t + float("inf")),
    "a NaN scale": _set("conv.scale", torch.tensor(float("nan"))),
    "a scale of 0": _set("conv.scale", torch.tensor(0.0)),
    "a negative scale of a weight": _set("conv.weight_scale", lambda t: -t),
    "a zero point out of range": _set("conv.zero_point", torch.tensor(300)),
    "a zero point between integers": _set("conv.zero_point", torch.tensor(0.5)),
    "integers out of range": _set("conv.weight", lambda t: t.int() + 300),
    "float weights": _set("conv.weight", lambda t: t.float() * 0.3),
    "truncated": lambda state: dict(list(state.items())[:5]),
    "another architecture": lambda _: nn.Linear(3, 3).state_dict(),
    "empty": lambda _: {},
}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_refused_and_nothing_is_loaded(model: bq.QuantizedModel, name: str) -> None:
    changed = WRONG[name]({key: value + 0 for key, value in model.state_dict().items()})
    before, x = copy.deepcopy(model.state_dict()), torch.randn(2, 2, 8, 8)
    expected = model(x)
    with pytest.raises(UsageError) as caught:
        model.load_state_dict(changed)
    snapshot(Path(__file__), name.replace(" ", "-"), str(caught.value))
    assert torch.equal(model(x), expected)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_of_another_backend() -> None:
    """x86 multiplies activations of 7 bits; qnnpack's have 8."""
    x86 = pair(CASES["residual"]).ours(calibrated=True)
    state = pair(CASES["residual, qnnpack"]).theirs.state_dict()
    state["conv.zero_point"] = torch.tensor(200)
    with pytest.raises(UsageError, match="200 is outside of"):
        x86.load_state_dict(state)


def test_not_strict(model: bq.QuantizedModel) -> None:
    """What is missing stays, as in PyTorch; a wrong shape is refused all the same."""
    state = {**model.state_dict(), "other": torch.ones(1)}
    kept = state.pop("conv.bias")
    result = model.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["conv.bias"], ["other"])
    assert torch.equal(model.state_dict()["conv.bias"], kept)
    with pytest.raises(UsageError, match="shape"):
        model.load_state_dict({"conv.bias": torch.ones(7)}, strict=False)


def test_what_was_loaded_is_not_shared(model: bq.QuantizedModel) -> None:
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    for value in state.values():
        value.zero_()
    assert model.state_dict()["conv.weight"].any()


def test_a_part_of_a_larger_model(model: bq.QuantizedModel) -> None:
    one = nn.ModuleDict({"inner": copy.deepcopy(model), "head": nn.Linear(3, 2)})
    two = copy.deepcopy(one)
    two["inner"].load_state_dict({**model.state_dict(), "conv.scale": torch.tensor(0.5)})
    assert set(two.state_dict()) == {f"inner.{k}" for k in model.state_dict()} | {
        "head.weight",
        "head.bias",
    }
    two.load_state_dict(one.state_dict())
    x = torch.randn(2, 2, 8, 8)
    assert torch.equal(two["inner"](x), one["inner"](x))


def test_a_copy_is_on_its_own(model: bq.QuantizedModel) -> None:
    copied, x = copy.deepcopy(model), torch.randn(2, 2, 8, 8)
    expected = model(x)
    copied.load_state_dict({**model.state_dict(), "conv.scale": torch.tensor(0.5)})
    assert not torch.equal(copied(x), expected)
    assert torch.equal(model(x), expected)


def test_children_stay_the_same_objects(model: bq.QuantizedModel) -> None:
    """A hook on a child is still there."""
    child, calls = model.get_submodule("conv"), []
    hook = child.register_forward_hook(lambda *_: calls.append(1))
    model.load_state_dict(model.state_dict())
    assert model.get_submodule("conv") is child and child._forward_hooks
    hook.remove()


BY_HAND = {
    **dict.fromkeys(
        ["prepare and convert", "save it again"],
        lambda _, n: n["model"].load_state_dict(n["before"]),
    ),
}
