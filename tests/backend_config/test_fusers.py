from __future__ import annotations

import inspect
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.ao.quantization.fuser_method_mappings import _reverse2, _reverse3, _sequential_wrapper2

from backquant.backend_config.fusers import (
    ForwardFuser,
    ReversedFuser,
    SequentialFuser,
    in_forward_order,
    in_reversed_order,
    reverse_sequential_wrapper2,
)
from backquant.errors import SpecError


def _record(*arguments: Any) -> Any:
    return arguments


def test_sequential_fuser_equals_pytorchs_wrapper() -> None:
    linear, relu = nn.Linear(2, 2), nn.ReLU()
    ours = SequentialFuser(nn.Sequential)
    oracle = _sequential_wrapper2(nn.Sequential)
    assert list(ours(True, linear, relu)) == list(oracle(True, linear, relu))
    assert len(inspect.signature(ours).parameters) == len(inspect.signature(oracle).parameters)
    assert len(inspect.signature(SequentialFuser(nn.Sequential, 3)).parameters) == 4


def test_sequential_fusers_are_equal_by_class_and_arity() -> None:
    assert SequentialFuser(nn.Sequential) == SequentialFuser(nn.Sequential)
    assert hash(SequentialFuser(nn.Sequential)) == hash(SequentialFuser(nn.Sequential))
    assert SequentialFuser(nn.Sequential) != SequentialFuser(nn.Sequential, 3)
    assert SequentialFuser(nn.Sequential) != SequentialFuser(nn.ModuleList)


def test_sequential_fuser_refuses_another_number_of_modules() -> None:
    with pytest.raises(SpecError) as caught:
        SequentialFuser(nn.Sequential)(False, nn.ReLU())
    assert caught.value.what == "SequentialFuser(torch.nn.Sequential) takes 2 modules, got 1"


def test_reversed_order_is_that_of_pytorch() -> None:
    assert ReversedFuser(_record)(True, "y", "x") == _reverse2(_record)(True, "y", "x")
    nested = (True, "relu", ("bn", "conv"))
    assert ReversedFuser(_record)(*nested) == _reverse3(_record)(*nested)


@given(st.lists(st.text(), min_size=2, max_size=6), st.booleans())
def test_the_two_orders_are_inverse(modules: list[str], is_qat: bool) -> None:
    assert ForwardFuser(ReversedFuser(_record))(is_qat, *modules) == (is_qat, *modules)


def test_changing_the_order_twice_gives_the_fuser_itself() -> None:
    assert in_forward_order(in_reversed_order(_record)) is _record
    assert in_reversed_order(in_forward_order(_record)) is _record
    assert in_forward_order(_record) == ForwardFuser(_record)


def test_wrapper_of_1_13_is_data() -> None:
    linear, relu = nn.Linear(2, 2), nn.ReLU()
    wrapper = reverse_sequential_wrapper2(nn.Sequential)
    assert list(wrapper(False, relu, linear)) == [linear, relu]
    assert wrapper == reverse_sequential_wrapper2(nn.Sequential)
    assert in_forward_order(wrapper) == SequentialFuser(nn.Sequential)
    assert repr(wrapper) == "ReversedFuser(SequentialFuser(torch.nn.Sequential))"


def test_refusals() -> None:
    with pytest.raises(SpecError, match="takes two or more modules, got 1"):
        ForwardFuser(_record)(False, "conv")
    with pytest.raises(SpecError, match="is not \\(last module, those before it\\)"):
        ReversedFuser(_record)(False, "a", "b", "c")
    for build in (SequentialFuser, ReversedFuser, ForwardFuser):
        with pytest.raises(SpecError, match="must be callable"):
            build("torch.nn.Sequential")
