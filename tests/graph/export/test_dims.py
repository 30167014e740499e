"""Dynamic shapes as users write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import CaptureError
from backquant.graph.export.program import check_dims, of_all_inputs


@pytest.mark.parametrize("dimension", [2, -3, "length", None])
def test_a_dimension_that_the_input_has_not(dimension: Any) -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(CaptureError, match=r"'input' has no dimension .*: its shape is \[2, 8\]"):
        backquant.quantize(
            nn.Linear(8, 4), x, calibration=[x], dynamic_shapes={"input": {dimension: "n"}}
        )


def test_an_input_that_the_model_has_not() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(CaptureError, match="no input 'x'") as caught:
        backquant.explain(nn.Linear(8, 4), x, dynamic_shapes={"x": {0: "n"}})
    assert caught.value.fix == "dynamic_shapes={'input': {0: 'batch'}}"


@pytest.mark.parametrize(
    "given",
    [None, {"x": {0: "n"}}, ({-2: "n"},), {"x": None}, {"more": ({0: "n"},)}, {"x": ("n",)}],
)
def test_what_is_well_formed(given: Any) -> None:
    check_dims(given, {"x": torch.zeros(2, 8), "more": (torch.zeros(1),)})


def test_inputs_without_a_word_are_of_fixed_sizes() -> None:
    given = {"x": torch.zeros(2), "more": {"a": [torch.zeros(1), 3], "b": None}, "none": None}
    filled = of_all_inputs({"x": {0: "batch"}}, given)
    assert filled == {"x": {0: "batch"}, "more": {"a": [None, None], "b": None}, "none": None}
    assert (
        of_all_inputs(({0: "batch"},), given) == ({0: "batch"},)
        and of_all_inputs(None, given) is None
    )
