"""Uses of operators that a dtype config does not admit: refused in the plan, with what was asked."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import backquant
from backquant.backend_config import DTypeConfig
from backquant.errors import SpecError

X = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(0))
DYNAMIC = backquant.QConfig(
    activation=backquant.PlaceholderObserver.with_args(
        dtype=torch.qint8, is_dynamic=True, quant_min=-128, quant_max=127
    ),
    weight=backquant.PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-127, quant_max=127
    ),
)


class Use(nn.Module):
    """A use of an operator after a convolution and before one."""

    def __init__(self, use) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.weight = nn.Parameter(torch.randn(4, 2, 1, 1))
        self.inner = use if isinstance(use, nn.Module) else None
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.inner(x) if self.inner is not None else self.use(x, self.weight)
        return self.last(x)


def reasons(use, mapping=None) -> dict[str, str]:
    """Of each operator that stays float for what it is: what was asked, and what is admitted."""
    report = backquant.explain(Use(use).eval(), X, backend="xnnpack", qconfig_mapping=mapping)
    return {
        row.operator: f"{reason.asked}; {reason.admitted}"
        for row in report.rows
        for reason in row.reasons
        if reason.rule == "operator" and row.outcome == "float"
    }


MEANS = {"axes 1": lambda x, w: x + x.mean(1, keepdim=True), "all axes": lambda x, w: x + x.mean()}


@pytest.mark.parametrize("told", MEANS)
def test_means_over_other_axes(told: str) -> None:
    assert reasons(MEANS[told]) == {".mean()": f"operator mean over {told}; operator inner axes"}


@pytest.mark.parametrize("axes", [(2, 3), (-1, -2)])
def test_means_over_inner_axes(axes: tuple[int, int]) -> None:
    assert reasons(lambda x, w: x.mean(axes, keepdim=True)) == {}


@pytest.mark.parametrize(
    "use", [nn.ConvTranspose2d(4, 4, 1, groups=2), lambda x, w: F.conv_transpose2d(x, w, groups=2)]
)
def test_a_transposed_convolution_with_groups_takes_one_scale(use) -> None:
    report = backquant.explain(Use(use).eval(), X, backend="xnnpack")
    [row] = [row for row in report.rows if "ranspose" in row.operator]
    assert row.outcome == "float"
    assert "per tensor" in row.reasons[0].admitted
    assert any(reason.asked == "operator 2 groups" for reason in row.reasons)
    # the fix is a weight observer with one scale, and it does
    assert "weight=MinMaxObserver" in row.reasons[0].fix
    mapping = backquant.get_default_qconfig_mapping("xnnpack")
    names = {"torch": torch, "qconfig_mapping": mapping}
    exec(f"from backquant import *\n{row.reasons[0].fix}", names)
    assert reasons(use, mapping) == {}
    report = backquant.explain(Use(use).eval(), X, backend="xnnpack", qconfig_mapping=mapping)
    assert all(row.outcome == "quantized" for row in report.rows)


def test_depthwise_convolutions_are_not_dynamic() -> None:
    mapping = backquant.QConfigMapping().set_object_type(nn.Conv2d, DYNAMIC)
    depthwise = nn.Conv2d(4, 4, 1, groups=4)
    assert reasons(depthwise, mapping) == {
        "Conv2d": "operator 4 groups of one channel; operator not depthwise"
    }
    assert reasons(nn.Conv2d(4, 4, 1, groups=2), mapping) == {}
    assert reasons(depthwise) == {}


@pytest.mark.parametrize(
    "use",
    [
        nn.ConvTranspose2d(4, 4, 4, stride=(2, 4)),
        lambda x, w: F.conv_transpose2d(x, torch.cat((w, w), 1), None, (2, 4)),
        lambda x, w: F.conv_transpose2d(x, torch.cat((w, w), 1), stride=4),
    ],
)
def test_a_transposed_convolution_with_a_long_stride(use) -> None:
    report = backquant.explain(Use(use).eval(), X, backend="openvino")
    [row] = [row for row in report.rows if "ranspose" in row.operator]
    [reason] = row.reasons
    assert reason.asked == "operator stride 4 along the last axis"
    assert reason.admitted.startswith("operator short last stride")


def test_only_has_its_words() -> None:
    assert DTypeConfig.from_dict({"only": "inner_axes"}).to_dict() == {"only": "inner_axes"}
    with pytest.raises(SpecError, match="only"):
        DTypeConfig(only="grouped")
