"""Experts of a mixture: one matrix for each group of rows, on integers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import backquant
from backquant.api import flow
from backquant.errors import InputError
from backquant.lower.kernels.grouped import GroupedLinear


class Experts(nn.Module):
    """``grouped_mm`` as users write it; the groups are inputs."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 24, 16, generator=generator))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x.relu(), self.weight.transpose(1, 2), offs=ends)


#: A group without rows, the first one, and one that has all.
ENDS = [[3, 3, 8, 12], [0, 5, 7, 12], [0, 0, 0, 12]]


@pytest.fixture(scope="module")
def rows() -> Tensor:
    return torch.randn(12, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=["static", "dynamic"])
def pair(request: pytest.FixtureRequest, rows: Tensor) -> tuple[nn.Module, nn.Module]:
    """The lowered and the reference model."""
    inputs = (rows, torch.tensor(ENDS[0], dtype=torch.int32))
    given: dict[str, Any] = {"calibration": [inputs]}
    if request.param == "dynamic":
        mapping = backquant.QConfigMapping().set_global(
            backquant.qconfig.per_channel_dynamic_qconfig
        )
        given = {"qconfig_mapping": mapping}
    references = []
    lower = flow.quantized_model

    def keep(reference: nn.Module, *rest: Any) -> nn.Module:
        references.append(copy.deepcopy(reference))
        return lower(reference, *rest)

    with mock.patch.object(flow, "quantized_model", keep):
        lowered = backquant.quantize(Experts(), inputs, backend="x86", slower="keep", **given)
    return lowered, references[-1]


@pytest.mark.parametrize("ends", ENDS)
def test_the_kernel_gives_what_the_reference_does(pair, rows, ends):
    lowered, reference = pair
    [kernel] = (m for m in lowered.graph_module.modules() if isinstance(m, GroupedLinear))
    assert lowered.report.coverage == 1.0
    assert lowered.report.rows[-1].kernel == kernel.name
    offsets = torch.tensor(ends, dtype=torch.int32)
    step = 1e-4 if kernel.config.is_dynamic else 1.01 * kernel.config.out_scale
    wanted = reference(rows, offsets)
    torch.testing.assert_close(lowered(rows, offsets), wanted, atol=step, rtol=0)


def test_groups_that_do_not_fit_are_refused(pair, rows):
    with pytest.raises(InputError, match="ends of groups"):
        pair[0](rows, torch.tensor([1, 3, 5, 7, 12], dtype=torch.int32))


def test_rows_behind_the_last_group_are_zero(pair, rows):
    ends = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    assert not pair[0](rows, ends)[4:].any()


@pytest.fixture(scope="module")
def mixtral() -> tuple[nn.Module, Tensor]:
    """The block of transformers' Mixtral."""
    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2
    )
    config._experts_implementation = "grouped_mm"  # the default of whole models
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(2)
        block = MixtralSparseMoeBlock(config).eval()
        for weight in block.parameters():
            nn.init.normal_(weight, std=0.2)
        return block, torch.randn(2, 9, 32)


def test_a_stock_mixture_runs_on_integers_is_recorded_and_saved(mixtral, tmp_path: Path):
    block, x = mixtral
    quantized = backquant.quantize(block, x, backend="x86", calibration=[x], slower="keep")
    assert quantized.report.coverage == 1.0
    found = [quantized(x) for _ in range(3)]
    assert not quantized.replays.refused
    noise = (found[-1] - block(x)).square().sum() / block(x).square().sum()
    assert -10 * noise.log10() > 25
    backquant.save(quantized, tmp_path / "m.bq")
    assert torch.equal(backquant.load(tmp_path / "m.bq")(x), found[0])


def test_a_stock_mixture_is_exported(mixtral, tmp_path: Path):
    """Every row by all matrices, of which one result is taken: ONNX has no such loop."""
    block, x = mixtral
    quantized = backquant.quantize(block, x, backend="onnxruntime", calibration=[x])
    exported = backquant.export(quantized, tmp_path / "m.onnx")  # raises where one is left in float
    session = onnxruntime.InferenceSession(exported.path, providers=["CPUExecutionProvider"])
    [found] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    noise = (torch.from_numpy(found) - block(x)).square().sum() / block(x).square().sum()
    assert -10 * noise.log10() > 25
