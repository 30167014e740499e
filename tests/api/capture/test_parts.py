"""What cannot be captured stays float, by module, with the reason; the rest is quantized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import ArtifactError, CaptureError, InputError, UsageError


class Router(nn.Module):
    """Chooses by the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        chosen = self.left if x.sum() > 0 else self.right
        return chosen(x) * scale, {"mean": x.mean(-1)}


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(8, 8), Router(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, info = self.router(torch.relu(self.first(x)), scale=0.5)
        y, _ = self.router(y, scale=2.0)
        return self.last(y) + info["mean"].unsqueeze(-1)


def test_a_submodule_that_no_capture_takes() -> None:
    model = Routed().eval()
    batches = [torch.randn(4, 8) for _ in range(4)]
    quantized = backquant.quantize(model, calibration=batches)
    rows = {row.name: row for row in quantized.report.rows}
    assert rows["first"].quantized and rows["last"].quantized
    assert rows["router"].outcome == "float"
    assert rows["router"].reasons[0].rule == "not-captured"
    why = "what it computes next depends on the values of a tensor"
    assert why in rows["router"].reasons[0].admitted
    assert f"'router' stays float as a whole: {why}" in quantized.report.notes
    for x in (torch.randn(3, 8), -torch.rand(6, 8)):
        with torch.no_grad():
            wanted = model(x)
        got = quantized(x)
        assert got.shape == wanted.shape
        assert (got - wanted).abs().max() < 0.2


def padding_of(x: torch.Tensor) -> torch.Tensor | None:
    padding = x < -1
    if not padding.any():
        return None
    return padding


class Masked(nn.Module):
    """As transformers' FSMT: a trace fails at one line, an export within what the next one calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, causal: bool = False) -> torch.Tensor:
        if not causal and x is not None:
            padding = padding_of(x)
        return self.fc(x if padding is None else x.masked_fill(padding, 0))


def test_the_line_of_the_export_and_not_of_the_trace_before_it() -> None:
    inputs = {"x": torch.randn(2, 8), "causal": False}
    for capture in ("auto", "export"):
        with pytest.raises(CaptureError) as told:
            backquant.quantize(Masked().eval(), inputs, calibration=[inputs], capture=capture)
        assert str(told.value.where).endswith("if not padding.any():"), capture


def test_its_artifact_names_the_class(tmp_path: Path) -> None:
    quantized = backquant.quantize(Routed().eval(), calibration=[torch.randn(4, 8)])
    with pytest.raises(ArtifactError, match="Router"):
        backquant.save(quantized, tmp_path / "model.bq")


def test_a_module_that_is_named_stays_whole() -> None:
    custom = backquant.PrepareCustomConfig().set_non_traceable_module_names(["router"])
    report = backquant.explain(
        Routed().eval(), torch.randn(4, 8), prepare_custom_config=custom, capture="export"
    )
    row = next(row for row in report.rows if row.name == "router")
    assert "PrepareCustomConfig names it" in row.reasons[0].admitted


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return self.fc(x)


def test_a_model_that_writes_to_itself() -> None:
    with pytest.raises(CaptureError, match="changes 'b_count' in place"):
        backquant.explain(Counting().eval(), torch.ones(2, 4), capture="export")
    inside = nn.Sequential(nn.Linear(4, 4), Counting()).eval()
    report = backquant.explain(inside, torch.ones(2, 4), capture="export")
    assert [row.outcome for row in report.rows] == ["quantized", "float"]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        y += 1
        view = y[:, :2]
        y[:, 1] = 0.5
        return torch.relu_(y) + view.sum()


def test_in_place_calls_and_views() -> None:
    model = InPlace().eval()
    x = torch.randn(3, 4)
    quantized = backquant.quantize(model, calibration=[x], capture="export")
    with torch.no_grad():
        wanted = model(x)
    assert torch.allclose(quantized(x), wanted, atol=0.1)
    assert torch.equal(quantized(x), quantized(x))


def test_arguments_of_the_call() -> None:
    model, x = nn.Linear(4, 4).eval(), torch.ones(2, 4)
    with pytest.raises(UsageError, match="there is no capture 'jit'"):
        backquant.quantize(model, calibration=[x], capture="jit")
    with pytest.raises(UsageError, match="dynamic_shapes is for"):
        backquant.explain(model, x, capture="trace", dynamic_shapes=({0: torch.export.Dim.AUTO},))
    with pytest.raises(UsageError, match="example inputs are needed"):
        backquant.explain(model, None, capture="export")


def test_dynamic_shapes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    x = torch.randn(2, 3, 8, 8)
    static = backquant.quantize(model, calibration=[x], capture="export")
    assert static(torch.randn(5, 3, 8, 8)).shape[0] == 5
    with pytest.raises(InputError, match="dimension 3 of input 'input' is 9"):
        static(torch.randn(2, 3, 8, 9))
    with pytest.raises(InputError, match="batch 1 does not fit the model: dimension 2"):
        backquant.quantize(model, calibration=[x, torch.randn(2, 3, 9, 8)], capture="export")
    auto = torch.export.Dim.AUTO
    free = ({0: auto, 2: auto, 3: auto},)
    dynamic = backquant.quantize(model, calibration=[x], dynamic_shapes=free)
    assert dynamic(torch.randn(1, 3, 16, 12)).shape == (1, 4, 14, 10)
    with pytest.raises(CaptureError, match="cannot be exported"):
        backquant.quantize(
            nn.Sequential(nn.Flatten(), nn.Linear(192, 2)).eval(),
            calibration=[x],
            dynamic_shapes=({2: torch.export.Dim("height")},),
        )
