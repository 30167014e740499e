"""Each description of ``examples/backends`` is satisfiable, quantizes stock models as docs/vendors.md says,
and keeps to the limits that it documents, tried on both sides of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.match.satisfiable import unsatisfiable
from tools import vendor_examples as examples


@pytest.mark.xdist_group("vendor-examples")  # the models are made once
@pytest.mark.parametrize("model", examples.MODELS)
@pytest.mark.parametrize("name", examples.BACKENDS)
def test_stock_models(name: str, model: str) -> None:
    share, sqnr = examples.stated()[name, model]
    found = examples.row(name, model)
    assert f"{100 * found.share:.1f}" == share
    assert abs(found.sqnr - sqnr) < 2.0  # kernels of CPUs add up in other orders


@pytest.mark.parametrize("name", [*examples.BACKENDS, "ethos_u85"])
def test_check_is_clean(name: str) -> None:
    backend = examples.backend(name)
    assert [*backend.validate(), *unsatisfiable(backend)] == []


class Times(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y


def image(channels: int = 3, batch: int = 1, side: int = 8) -> torch.Tensor:
    return torch.randn(batch, channels, side, side)


def conv(kernel: Any, channels: int = 3, out: int = 8, **more: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, out, kernel, **more))


def transposed(kernel: int) -> nn.Module:
    return nn.Sequential(nn.ConvTranspose2d(3, 8, kernel, 2))


def matrices(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*shape), torch.randn(*shape)


# the description, what is inside of a limit, what is beyond it, and what the reason names
LIMITS: list[tuple[str, nn.Module, Any, nn.Module, Any, str]] = [
    ("ethos_u55", conv(1, stride=3), image(), conv(1, stride=4, padding=1), image(), "stride"),
    ("ethos_u55", conv(3, 4, 4, groups=4), image(4), conv(3, 4, 4, groups=2), image(4), "groups"),
    ("ethos_u55", nn.MaxPool2d(2), image(), nn.MaxPool2d(2, dilation=2), image(), "dilation"),
    ("ti_tidl", conv((1, 7)), image(), conv((3, 7)), image(), "kernel_"),
    ("ti_tidl", conv(5, stride=2), image(), conv(5, stride=(1, 2)), image(), "stride_"),
    ("ti_tidl", conv(11, stride=4), image(side=12), conv(9, stride=4), image(side=12), "kernel_size"),
    ("ti_tidl", conv(3, dilation=2), image(), conv(3, dilation=2, stride=2), image(), "dilation"),
    ("ti_tidl", conv(3, 4, 4, groups=4), image(4), conv(3, 4, 4, groups=2), image(4), "groups"),
    ("ti_tidl", nn.MaxPool2d(3, 1), image(), nn.MaxPool2d(2, 1), image(), "kernel_size"),
    ("ti_tidl", nn.AdaptiveAvgPool2d(1), image(side=32), nn.AdaptiveAvgPool2d(1), image(side=33), "height"),
    ("ti_tidl", transposed(4), image(), transposed(5), image(), "kernel_size"),
    ("ti_tidl", Times(), matrices(1, 2, 4, 4), Times(), matrices(2, 2, 4, 4), "dims"),
    ("ti_tidl", nn.Upsample(scale_factor=4), image(), nn.Upsample(scale_factor=3), image(), "height"),
    ("qualcomm_htp", nn.Tanh(), image(), nn.LogSigmoid(), image(), "no entry"),
    ("esp32_p4", conv(3), image(), conv(3), image(batch=2), "batch"),
    ("esp32_p4", conv(3, 4, 4, groups=4), image(4), conv(3, 4, 4, groups=2), image(4), "groups"),
    ("esp32_p4", nn.MaxPool2d(2), image(), nn.MaxPool2d(2, dilation=2), image(), "dilation"),
    ("esp32_p4", Times(), matrices(1, 2, 4, 4), Times(), matrices(1, 1, 2, 4, 4), "rank"),
    ("nxp_neutron", conv(8, 1008, 1), image(1008), conv(8, 1024, 1), image(1024), "kernel_height"),
    ("nxp_neutron", conv(3, 4, 4, groups=4), image(4), conv(3, 4, 8, groups=4), image(4), "groups"),
    ("nxp_neutron", nn.MaxPool2d(2), image(), nn.MaxPool2d(2, ceil_mode=True), image(), "ceil_mode"),
    ("nxp_neutron", nn.AdaptiveAvgPool2d(4), image(), nn.AdaptiveAvgPool2d(3), image(), "height"),
    ("nxp_neutron", nn.Softmax(-1), torch.randn(1, 4, 8), nn.Softmax(1), torch.randn(1, 4, 8), "dim"),
    ("nxp_neutron", Times(), matrices(2, 4, 4), Times(), matrices(1, 2, 4, 4), "rank"),
    ("intel_gaudi2", nn.Linear(4, 4), torch.randn(1, 4), nn.ReLU(), torch.randn(1, 4), "only within"),
]  # fmt: skip


@pytest.mark.parametrize("case", LIMITS, ids=lambda case: f"{case[0]}-{case[-1]}".replace(" ", "-"))
def test_a_limit(case: tuple[str, nn.Module, Any, nn.Module, Any, str]) -> None:
    name, inside, x, beyond, y, word = case
    backend = examples.backend(name)
    [taken] = backquant.explain(inside, x, backend=backend).operators
    [left] = backquant.explain(beyond, y, backend=backend).operators
    assert (taken.outcome, left.outcome) == ("quantized", "float"), (taken.reasons, left.reasons)
    assert word in str(left.reasons[0]), left.reasons[0]
