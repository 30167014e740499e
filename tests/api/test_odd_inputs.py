"""Inputs and models of kinds that observers and files do not know: sparse, nested, named tuples, modules of
exported programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import InputError, UsageError
from backquant.reason_codes import ReasonCode


class Graph(nn.Module):
    """A layer over the neighbours of each node."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, edges: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(edges @ self.fc(x)))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_what_reads_a_sparse_tensor_stays_float_with_the_reason() -> None:
    torch.manual_seed(0)
    model, x = Graph().eval(), (torch.eye(6).to_sparse(), torch.randn(6, 8))
    quantized = backquant.quantize(model, x, backend="onnxruntime", calibration=[x], slower="keep")
    [product] = (row for row in quantized.report.rows if "matmul" in row.node)
    assert product.reasons[0].rule == ReasonCode.CONDITION
    assert product.reasons[0].asked == "a sparse tensor"
    assert sum(row.outcome == "quantized" for row in quantized.report.rows) >= 2
    noise = (quantized(*x) - model(*x)).square().sum() / model(*x).square().sum()
    assert float(noise.detach()) < 1e-3


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(6).to_sparse())
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.sparse.mm(self.edges, x))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_sparse_buffer_is_kept() -> None:
    torch.manual_seed(0)
    model, x = Held().eval(), torch.randn(6, 8)
    quantized = backquant.quantize(model, x, backend="x86", calibration=[x], slower="keep")
    noise = (quantized(x) - model(x)).square().sum() / model(x).square().sum()
    assert float(noise.detach()) < 1e-3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_with_the_way_out() -> None:
    rows = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    with pytest.raises(InputError, match="nested tensor") as error:
        backquant.quantize(nn.Linear(4, 4), rows, backend="x86", calibration=[rows])
    x = rows.to_padded_tensor(0.0)  # as the error says
    assert "to_padded_tensor(0.0)" in str(error.value)
    assert backquant.quantize(nn.Linear(4, 4), x, backend="x86", calibration=[x]) is not None


def test_the_module_of_an_exported_program_is_refused_with_the_way_out(
    snapshot: Callable[..., None],
) -> None:
    x = torch.randn(2, 4)
    program = torch.export.export(nn.Linear(4, 4), (x,))
    with pytest.raises(UsageError) as error:
        backquant.quantize(program.module(), x, backend="x86", calibration=[x])
    snapshot("module-of-a-program", error.value)
    assert backquant.quantize(program, x, backend="x86", calibration=[x]) is not None


class Batch(NamedTuple):
    image: torch.Tensor
    scale: torch.Tensor


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.fc(batch.image) * batch.scale


def test_a_saved_model_takes_the_named_tuple_that_it_was_quantized_with(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = Batch(torch.randn(3, 8), torch.randn(3, 1))
    model = Scaled().eval()
    quantized = backquant.quantize(model, (batch,), backend="x86", calibration=[(batch,)])
    backquant.save(quantized, tmp_path / "model.bq")
    loaded = backquant.load(tmp_path / "model.bq")
    torch.testing.assert_close(loaded(batch), quantized(batch), rtol=0, atol=0)


BY_HAND = {
    "backquant.quantize(program": lambda _, n: backquant.quantize(
        n["program"], n["x"], backend="x86", calibration=[n["x"]]
    ),
}
