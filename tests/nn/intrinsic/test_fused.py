"""Fused float modules against ``torch.ao.nn.intrinsic``."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as oracle
from torch import nn
from torch.nn.utils import parametrize

from backquant.errors import ConfigError
from backquant.nn import intrinsic

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def parts_of(name: str) -> list[nn.Module]:
    """New modules that fit the fused class ``name``."""
    if name.startswith("Conv"):
        dimensions = int(name[-2])
        parts: list[nn.Module] = [CONV[dimensions](3, 4, 2)]
        parts += [NORM[dimensions](4)] if "Bn" in name else []
        return parts + ([nn.ReLU()] if "ReLU" in name else [])
    if name.startswith("BN"):
        return [NORM[int(name[-2])](3), nn.ReLU()]
    last = {"ReLU": nn.ReLU(), "Bn1d": nn.BatchNorm1d(4), "Tanh": nn.Tanh()}
    return [nn.Linear(3, 4), last.get(name.removeprefix("Linear"), nn.LeakyReLU(0.2))]


SEQUENCES = [
    *(f"{kind}{d}d" for kind in ("ConvReLU", "ConvBn", "ConvBnReLU") for d in (1, 2, 3)),
    "BNReLU2d",
    "BNReLU3d",
    "LinearReLU",
    "LinearBn1d",
    "LinearLeakyReLU",
    "LinearTanh",
]


def _input(name: str) -> torch.Tensor:
    return torch.randn(5, 3, *[4] * (0 if name.startswith("Linear") else int(name[-2])))


def test_every_class_of_the_oracle_exists() -> None:
    assert set(oracle.modules.__all__) <= set(intrinsic.__all__)


@pytest.mark.parametrize("name", SEQUENCES)
def test_same_children_state_and_output(name: str) -> None:
    parts = parts_of(name)
    ours = getattr(intrinsic, name)(*parts)
    theirs = getattr(oracle, name)(*copy.deepcopy(parts))
    assert list(ours._modules) == list(theirs._modules)
    assert list(ours) == parts
    other = getattr(intrinsic, name)(*parts_of(name))
    other.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(other.state_dict())
    x = _input(name)
    assert torch.equal(ours(x), theirs(x))
    assert isinstance(ours, nn.Sequential) and isinstance(ours, intrinsic.FusedModule)


@pytest.mark.parametrize("name", SEQUENCES)
def test_copies_and_keywords(name: str) -> None:
    cls = getattr(intrinsic, name)
    ours = cls(**dict(zip(cls._parts, parts_of(name), strict=True))).eval()
    x = _input(name)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(twin) is cls
        assert torch.equal(twin(x), ours(x))


@pytest.mark.parametrize("name", SEQUENCES)
def test_other_modules_are_refused(name: str) -> None:
    cls = getattr(intrinsic, name)
    with pytest.raises(ConfigError, match=f"{name} cannot be made of") as error:
        cls(*[nn.Identity()] * len(parts_of(name)))
    assert error.value.fix.startswith(f"{name}(")
    with pytest.raises(ConfigError, match=f"{name} takes {len(parts_of(name))} modules, got 1"):
        cls(parts_of(name)[0])


def test_a_subclass_is_another_type() -> None:
    class Mine(nn.Conv2d):
        pass

    with pytest.raises(ConfigError, match="made of Mine, ReLU"):
        intrinsic.ConvReLU2d(Mine(1, 1, 1), nn.ReLU())


def test_a_parametrized_part_counts_as_its_type() -> None:
    linear = nn.Linear(2, 2)
    parametrize.register_parametrization(linear, "weight", nn.Identity())
    assert len(intrinsic.LinearReLU(linear, nn.ReLU())) == 2


def test_training_flag_is_that_of_the_parts() -> None:
    """PyTorch's containers are in training mode whatever they contain."""
    conv, relu = nn.Conv2d(1, 1, 1).eval(), nn.ReLU().eval()
    assert not intrinsic.ConvReLU2d(conv, relu).training
    assert not intrinsic.ConvAdd2d(conv, torch.add).training
    assert intrinsic.ConvReLU2d(conv.train(), relu.train()).training


def test_a_slice_is_a_plain_sequence() -> None:
    block = intrinsic.ConvBnReLU2d(*parts_of("ConvBnReLU2d"))
    assert type(block[:2]) is nn.Sequential
    assert list(block[:2]) == list(block)[:2]


@pytest.mark.parametrize("add", [torch.add, operator.add])
def test_conv_add(add: Any) -> None:
    conv = nn.Conv2d(2, 2, 1)
    x, y = torch.randn(1, 2, 3, 3), torch.randn(1, 2, 3, 3)
    ours, theirs = intrinsic.ConvAdd2d(conv, add), oracle.ConvAdd2d(conv, add)
    assert torch.equal(ours(x, y), theirs(x, y))
    relu = nn.ReLU()
    both = intrinsic.ConvAddReLU2d(conv, add, relu), oracle.ConvAddReLU2d(conv, add, relu)
    assert torch.equal(both[0](x, y), both[1](x, y))
    for one, two in [(ours, theirs), both]:
        assert list(one.state_dict()) == list(two.state_dict())
        assert list(one._modules) == list(two._modules)
        assert torch.equal(copy.deepcopy(one)(x, y), one(x, y))
        assert torch.equal(pickle.loads(pickle.dumps(one))(x, y), one(x, y))


def test_conv_add_needs_callables() -> None:
    with pytest.raises(ConfigError, match="needs functions or modules, got 'add'"):
        intrinsic.ConvAdd2d(nn.Conv2d(1, 1, 1), "add")  # type: ignore[arg-type]
