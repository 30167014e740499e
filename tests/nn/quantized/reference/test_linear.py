"""The reference linear against ``torch.ao``'s."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.quantized.reference as oracle
from tests.nn.quantized.reference.rounding import same_integers
from torch import nn

from backquant.graph.dialect_ops import register_quantized_decomposed
from backquant.nn.quantized import reference

KINDS = [
    "per_tensor_symmetric",
    "per_tensor_affine",
    "per_channel_symmetric",
    "per_channel_affine",
    "int32",
    "float_qparams",
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_is_bit_equal(kind: str, bias: bool, qparams: Any) -> None:
    for sizes in [(3, 5), (16, 1), (1, 7), (33, 64)]:
        linear = nn.Linear(*sizes, bias=bias)
        asked = qparams(linear.weight, kind)
        ours = reference.Linear.from_float(linear, asked)
        theirs = oracle.Linear.from_float(linear, asked)
        x = torch.randn(2, 4, sizes[0])
        integers = theirs.get_quantized_weight().int_repr()
        assert same_integers(ours.weight, integers)
        if torch.equal(ours.weight, integers):
            assert torch.equal(ours(x), theirs(x))
        assert ours._get_name() == theirs._get_name()


def test_saturating_bounds_are_those_of_the_decomposed_oracle(qparams: Any) -> None:
    register_quantized_decomposed()
    linear = nn.Linear(8, 4)
    asked = {**qparams(linear.weight, "per_channel_symmetric"), "quant_min": -20, "quant_max": 19}
    ours = reference.Linear.from_float(linear, asked)
    theirs = oracle.Linear.from_float(linear, {**asked, "is_decomposed": True})
    x = torch.randn(2, 8)
    assert int(ours.weight.max()) == 19
    assert torch.equal(ours(x), theirs(x))


def test_float16_is_stored_and_used() -> None:
    """PyTorch's reference module computes with the float32 weight: a difference on purpose."""
    linear = nn.Linear(8, 4)
    asked = {"qscheme": None, "dtype": torch.float16}
    ours = reference.Linear.from_float(linear, asked)
    theirs = oracle.Linear.from_float(linear, asked)
    x = torch.randn(2, 8)
    assert torch.equal(ours.weight, theirs.get_quantized_weight())
    rounded = torch.nn.functional.linear(x, linear.weight.half().float(), linear.bias)
    assert torch.equal(ours(x), rounded)
    assert not torch.equal(ours(x), theirs(x))


def test_tokens_of_plain_dtypes_are_stored_alike(qparams: Any) -> None:
    linear = nn.Linear(8, 4)
    asked = qparams(linear.weight, "per_channel_symmetric")
    one = reference.Linear.from_float(linear, asked)
    two = reference.Linear.from_float(linear, {**asked, "dtype": torch.int8})
    assert torch.equal(one.weight, two.weight)
    assert (one.weight_dtype, two.weight_dtype) == (torch.qint8, torch.int8)
