"""Operators in place, and those that give the same as a new value."""

from __future__ import annotations

import pytest
import torch
from torch._ops import OpOverload

from backquant.graph.export.tidy import functional

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("in_place", "args"),
    [
        (aten.add_.Tensor, (2,)),
        (aten.floor_divide_.Tensor, (2,)),
        (aten.pow_.Scalar, (3,)),
        (aten.pow_.Tensor, (torch.tensor([1.0, 2.0, 3.0]),)),
        (aten.clamp_.default, (1, 2)),
        (aten.transpose_.default, (0, 1)),
        (aten.relu_.default, ()),
    ],
)
def test_the_value_is_what_would_be_written(in_place: OpOverload, args: tuple[object, ...]) -> None:
    found = functional(in_place)
    assert found is not None
    x = torch.randn(4, 3).abs()
    value = found(x, *args)
    torch.testing.assert_close(value, in_place(x, *args), rtol=0, atol=0)


def test_none_for_what_writes_elsewhere_as_well() -> None:
    assert functional(aten.rrelu_with_noise_.default) is None
