"""Modules with names that no source can hold are captured under plain ones, and go on under their own."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from backquant.graph.clone import with_plain_names
from backquant.identifiers import is_identifier

ODD = [
    "in",
    "class",
    "a b",
    'q"t',
    "it's",
    "l\nf",
    "µ",
    "μ",
    "ｆ",
    "\ud800",
    "__x",
    "bqname_x",
    "{y}",
]


class Heads(nn.Module):
    """Reads its modules, parameters and buffers in the ways that models do."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(3, 3) for name in names})
        self.scales = nn.ParameterDict({name: nn.Parameter(torch.randn(3)) for name in names})
        for name in names:
            self.register_buffer(name, torch.randn(3))
            setattr(self, name + "'", nn.Tanh())
        self.names = names

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {name: head(x) * self.scales[name] for name, head in self.heads.items()}
        assert list(self.heads) == list(self.heads.keys()) == self.names
        assert all(name in self.heads and hasattr(self, name) for name in self.names)
        named = {name for name, _ in self.named_children()}
        assert all(f"{name}'" in named for name in self.names)
        return {
            name: getattr(self, f"{name}'")(value) + getattr(self, name)
            for name, value in found.items()
        }


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_copy_computes_the_same_under_plain_names() -> None:
    model, x = Heads(ODD), torch.randn(2, 3)
    copied = with_plain_names(model)
    parts = [part for path, _ in copied.named_modules() for part in path.split(".") if part]
    tensors = [name for key in copied.state_dict() for name in key.split(".")]
    assert all(is_identifier(name) for name in (*parts, *tensors))
    assert _same(copied(x), model(x))
    assert copied.heads["in"].weight is model.heads["in"].weight


def test_the_model_is_not_changed() -> None:
    model = Heads(ODD)
    keys, kinds = list(model.state_dict()), [type(part) for part in model.modules()]
    with_plain_names(model)
    assert list(model.state_dict()) == keys
    assert [type(part) for part in model.modules()] == kinds


def test_plain_models_are_returned_as_they_are() -> None:
    model = Heads(["a", "b"])
    model = nn.Sequential(nn.Linear(2, 2), model.heads)
    assert with_plain_names(model) is model


def test_the_copy_is_copied_and_pickled() -> None:
    model, x = Heads(ODD), torch.randn(2, 3)
    copied = with_plain_names(model)
    for again in (copy.deepcopy(copied), pickle.loads(pickle.dumps(copied))):
        assert _same(again(x), model(x))


def test_what_is_assigned_is_read() -> None:
    copied = with_plain_names(Heads(["in"]))
    setattr(copied, "in", torch.ones(3))
    assert torch.equal(getattr(copied, "in"), torch.ones(3))
    assert torch.equal(dict(copied.named_buffers())["bqname_in"], torch.ones(3))
    delattr(copied, "in")
    assert not hasattr(copied, "in")


def test_whole_modules_keep_their_names() -> None:
    model = nn.Sequential(Heads(["in"]))
    assert (
        with_plain_names(model, lambda part: isinstance(part, (Heads, nn.ModuleDict))) is not model
    )
    assert with_plain_names(model, lambda part: not isinstance(part, nn.Sequential)) is model


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(min_size=1).filter(lambda s: "." not in s), min_size=1, unique=True))
def test_any_keys_of_a_dict(names: list[str]) -> None:
    names = [name for name in names if not hasattr(nn.ModuleDict(), name)]
    model = nn.ModuleDict({name: nn.Linear(1, 1) for name in names})
    copied = with_plain_names(model)
    assert list(copied) == names
    assert all(copied[name].weight is model[name].weight for name in names)


@pytest.mark.parametrize("name", ["in", "µ"])
def test_shared_modules_stay_shared(name: str) -> None:
    part = nn.ModuleDict({name: nn.Linear(1, 1)})
    copied = with_plain_names(nn.Sequential(part, part))
    assert copied[0] is copied[1]


def test_an_object_without_tables_takes_attributes() -> None:
    """``torch.export`` hands an empty object the attributes of a module that it meets again."""
    copied = with_plain_names(nn.ModuleDict({"in": nn.ReLU()}))
    again = type(copied).__new__(type(copied))
    again.__dict__ = copied.__dict__
    assert again["in"] is copied["in"]
