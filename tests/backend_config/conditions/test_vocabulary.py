"""Names in conditions: of quantities, of parameters of the pattern's operators, of its parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from backquant.backend_config import BackendPatternConfig, DTypeConfig, GraphPattern
from backquant.backend_config.conditions.vocabulary import parameters_of, part_names
from backquant.errors import SpecError

SCALED = GraphPattern(["x", "by"], {"product": (torch.mul, "x", "by"), "out": (F.gelu, "product")})


@pytest.mark.parametrize(
    ("pattern", "where"),
    [
        (nn.Conv2d, {"padding_mode": "zeros"}),
        (F.interpolate, {"mode": ["nearest", "bilinear"], "align_corners": {"not": True}}),
        (torch.mean, {"keepdim": True}),
        ("mean", {"keepdim": True}),
        (torch.ops.aten.leaky_relu.default, {"negative_slope": {"max": 1}}),
        ((nn.Conv2d, nn.BatchNorm2d), {"BatchNorm2d.eps": {"max": 1}, "kernel_size": 3}),
        (SCALED, {"by.elements": 1, "out.approximate": "none", "product.rank": 4}),
    ],
)
def test_names_that_are_there(pattern, where) -> None:
    entry = BackendPatternConfig(pattern).set_where(where)
    assert BackendPatternConfig.from_dict(entry.to_dict()) == entry


def test_parts_have_names() -> None:
    assert part_names(BackendPatternConfig(SCALED)) == {"x": 0, "by": 1, "product": 2, "out": 3}
    assert part_names(BackendPatternConfig((F.conv2d, "relu"))) == {"conv2d": 0, "relu": 1}


def test_parameters_of_what_dispatches() -> None:
    assert "kernel_size" in (parameters_of(F.max_pool2d) or ())
    assert parameters_of(object()) is None


WRONG = {
    "quantity": (nn.Conv2d, {"kernel_sise": 3}),
    "parameter": (F.interpolate, {"align_corner": True}),
    "subject": (nn.Conv2d, {"inptu.rank": 3}),
    "of_a_tensor": (nn.Conv2d, {"input.groups": 3}),
    "deep": (nn.Conv2d, {"any": [{"stride": 1}, {"not": {"strid": 1}}]}),
}


@pytest.mark.parametrize("name", WRONG)
def test_names_that_are_not_there(name: str, snapshot) -> None:
    pattern, where = WRONG[name]
    with pytest.raises(SpecError) as error:
        BackendPatternConfig(pattern).set_where(where)
    snapshot(f"name_{name}", str(error.value))
    with pytest.raises(SpecError, match=error.value.what.partition(" ")[0]):
        BackendPatternConfig(pattern).add_dtype_config(DTypeConfig(where=where))
