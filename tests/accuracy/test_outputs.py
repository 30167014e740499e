"""What samples add to the loss, where values decide how large outputs are (transformers' VITS: predicted
speech; detectors): ``quantize`` ended with an error of torch."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.accuracy import outputs
from backquant.accuracy.figures import MOST_LOSS
from backquant.accuracy.outputs import FloatOutputs, losses_of


@pytest.mark.parametrize(
    ("found", "noise"),
    [
        (torch.ones(2, 3), [4.0, 4.0]),  # one of three wanted values is not there
        (torch.ones(2, 5), [4.0, 4.0]),  # one too many
        (torch.ones(1, 4), [0.0, 16.0]),
        (torch.ones(3, 4), [0.0, 0.0]),
        (torch.ones(2, 2, 2), [MOST_LOSS * 16, MOST_LOSS * 16]),
    ],
)
def test_what_one_lacks_is_zero_to_the_other(found: torch.Tensor, noise: list[float]) -> None:
    wanted = torch.full((2, 4), 2.0)
    found = found if found.dim() == 3 else found * 2
    losses = losses_of([[wanted]], [[found]])
    torch.testing.assert_close(losses, torch.tensor(noise, dtype=torch.float64) / 32)


class Counted(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_outputs_are_held_as_far_as_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "_BYTES", 2 * 4 * 3 * 4)  # of two batches
    model, other = Counted(2, 3), nn.Linear(2, 3)
    batches = [torch.randn(4, 2) for _ in range(3)]
    held = FloatOutputs(model, batches)
    first = held.losses(other, "comparing")
    assert torch.equal(held.losses(other, "comparing"), first)
    assert model.calls == 3 + 1  # the third batch once more
    assert len(first) == 12


class _Growing(nn.Module):
    """Its call appends to the cache among its inputs, as decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: types.SimpleNamespace) -> torch.Tensor:
        cache.keys = torch.cat([cache.keys, x])
        return self.fc(cache.keys)


def _batch() -> tuple[torch.Tensor, types.SimpleNamespace]:
    return torch.randn(2, 4), types.SimpleNamespace(keys=torch.randn(3, 4))


def _quantized(batch: Any) -> Any:
    return backquant.quantize(
        _Growing(), _batch(), backend="x86", calibration=[batch], slower="keep"
    )


def test_a_measured_accuracy_leaves_the_batch_as_it_is() -> None:
    """The quantized model read the cache that the float one had made longer: figures of two inputs."""
    batch = _batch()
    quantized = _quantized(batch)
    assert len(batch[1].keys) == 3
    assert quantized.report.figures.sqnr > 20


def test_comparisons_leave_batches_as_they_are(tmp_path: Path) -> None:
    batch, model = _batch(), _Growing()
    FloatOutputs(model, [batch]).losses(model, "comparing")
    assert len(batch[1].keys) == 3
    quantized = backquant.quantize(model, _batch(), backend="onnxruntime", calibration=[batch])
    path = tmp_path / "model.onnx"
    backquant.export(quantized, path)
    backquant.compare(model, path, [batch])
    assert len(batch[1].keys) == 3
