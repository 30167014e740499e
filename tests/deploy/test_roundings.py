"""How far roundings lead a reference model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant
from backquant.backend_config import BackendConfig
from backquant.deploy.job import ExportJob
from backquant.deploy.roundings import computed, dithered, ratio
from backquant.match.plan import Plan


class Named(nn.Module):
    """An input with a default, and an output that is no float."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        value = self.other(self.one(x).relu())
        return {"places": value.argmax(-1), "value": value if y is None else value + y}


@pytest.fixture(scope="module")
def job() -> ExportJob:
    torch.manual_seed(0)
    x = torch.randn(32, 8)
    model = backquant.quantize(Named().eval(), backend="xnnpack", calibration=[x])
    return ExportJob(model.graph_module, (x,), {}, None, BackendConfig("b"), Plan("b"), {}, ())


def test_computed_is_the_reference_model(job) -> None:
    [value] = computed(job)
    assert torch.equal(value, job.module(*job.args)["value"])


def test_noise_of_half_a_step(job) -> None:
    """Twice the noise of rounding itself (a step's variance is a twelfth of it), and the same each time."""
    [value], [one], [other] = computed(job), dithered(job), dithered(job)
    assert torch.equal(one, other)
    assert 25.0 < ratio([value], [one]) < 45.0


def test_inputs_are_not_changed(job) -> None:
    before = job.args[0].clone()
    dithered(job)
    assert torch.equal(job.args[0], before)


@pytest.mark.parametrize(
    "other", [torch.full((2,), torch.nan), torch.tensor([1.0, torch.inf]), torch.ones(2, 1)]
)
def test_what_is_not_finite_or_of_another_shape(other: torch.Tensor) -> None:
    assert ratio([torch.ones(2)], [other]) == -120.0
    assert ratio([other], [other]) == 120.0
