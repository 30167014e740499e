"""``compare`` takes what ``export`` wrote, and runs it in its own runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.snapshots import compare as snapshot
from torch import nn

import backquant
from backquant.errors import BackquantError


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.fc(x)
        return {"logits": y, "scaled": y * scale}


def _data() -> list[dict[str, torch.Tensor]]:
    return [{"scale": torch.rand(4, 1), "x": torch.randn(4, 8)} for _ in range(2)]


def _exported(backend: str, path: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    model, data = Heads().eval(), _data()
    mapping = backquant.default_mapping(backend, weight_bits=7)  # equal on all CPUs
    quantized = backquant.quantize(
        model, backend=backend, calibration=data, qconfig_mapping=mapping
    )
    return model, data, backquant.export(quantized, path, **options)


@pytest.mark.parametrize(
    ("backend", "name"), [("onnxruntime", "model.onnx"), ("openvino", "model.xml")]
)
def test_a_file_is_compared_by_its_outputs(backend: str, name: str, tmp_path: Path) -> None:
    model, data, exported = _exported(backend, tmp_path / name)
    by_path = backquant.compare(model, tmp_path / name, data)
    found = backquant.compare(
        model, exported, data, metric=lambda net: float(net(**data[0])["logits"].mean())
    )
    assert len(found.outputs) == 2 and by_path.outputs == found.outputs
    assert all(30 < output.sqnr < 90 for output in found.outputs)
    assert found.metric is not None and found.metric[0] == pytest.approx(found.metric[1], abs=0.05)


def test_a_file_of_save_is_compared_operator_by_operator(tmp_path: Path) -> None:
    model, data = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), [torch.randn(16, 8)]
    quantized = backquant.quantize(model, calibration=data, slower="keep")
    backquant.save(quantized, tmp_path / "model.bq")
    assert backquant.compare(model, tmp_path / "model.bq", data).rows


BY_HAND = {
    "batches of these sizes": lambda _, names: backquant.compare(
        names["model"], names["exported"], names["data"]
    ),
    "the path that backquant.export was given": lambda _, names: backquant.compare(
        names["model"], names["exported"].path, names["data"]
    ),
    "the file that was exported from this model": lambda _, names: backquant.compare(
        names["model"], names["exported"], names["data"]
    ),
    "export it once more": lambda _, names: backquant.compare(
        names["model"], names["exported"], names["data"]
    ),
}


def test_messages(tmp_path: Path) -> None:
    model, data, exported = _exported("onnxruntime", tmp_path / "model.onnx")
    one, batches = nn.Linear(8, 4).eval(), [torch.randn(4, 8)]
    whole = backquant.quantize(one, backend="onnxruntime", calibration=batches)
    backquant.export(whole, tmp_path / "integers.onnx", integer_io={"input": True})
    short = [{"scale": torch.rand(3, 1), "x": torch.randn(3, 8)}]
    texts = []
    assert exported.path.is_file()
    for net, path, used in (
        (model, "model.onnx", short),
        (_OneHead(), "model.onnx", data),
        (one, "integers.onnx", batches),
        (one, "missing.onnx", batches),
    ):
        with pytest.raises(BackquantError) as caught:
            backquant.compare(net, tmp_path / path, used)
        texts.append(str(caught.value).replace(str(tmp_path), "FOLDER"))
    snapshot(Path(__file__), "messages", "\n".join(texts))


class _OneHead(Heads):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.fc(x) * scale
