"""The example of docs/qat.md runs, and what it names exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant

CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
PAGE = (Path(__file__).parents[2] / "docs" / "qat.md").read_text(encoding="utf-8")


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    code = CODE.findall(PAGE)[0]
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "docs/qat.md", "exec"), names)
    percent, kernels = re.findall(r"\d+", capsys.readouterr().out)
    assert int(percent) > 80
    assert int(kernels) == len(names["quantized"].kernels) > 2


class Normed(nn.Module):
    """A norm as the decoders of transformers write it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.filterwarnings("ignore")
def test_norms_that_are_written_out() -> None:
    """Numbers by the rules of the description, NaN without them, as the page says."""
    names: dict[str, Any] = {"backquant": backquant}
    exec(compile(CODE.findall(PAGE)[1], "docs/qat.md", "exec"), names)
    torch.manual_seed(0)
    x = torch.randn(64, 8) * torch.logspace(-3, 0, 64).unsqueeze(1)
    mapping = backquant.get_default_qat_qconfig_mapping("x86")
    finite = []
    for backend in ("x86", names["as_pytorch"]):
        prepared = backquant.prepare_qat_fx(Normed().train(), mapping, (x,), backend_config=backend)
        finite.append(bool(prepared(x).isfinite().all()))
    assert finite == [True, False]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(nn\.[\w.]*qat\.\w+)`", PAGE))))
def test_modules_exist(name: str) -> None:
    room, _, kind = name.rpartition(".")
    assert issubclass(getattr(importlib.import_module(f"backquant.{room}"), kind), nn.Module)


@pytest.mark.parametrize(
    "name",
    [
        *("disable_observer", "enable_observer", "disable_fake_quant", "enable_fake_quant"),
        *("prepare_qat_fx", "convert_fx", "convert_to_reference_fx", "synchronize_observers"),
        *("default_embedding_qat_qconfig", "get_default_qat_qconfig_mapping"),
    ],
)
def test_names_are_public(name: str) -> None:
    assert name in PAGE
    rooms = (backquant, backquant.api, backquant.observe, backquant.qconfig)
    assert any(hasattr(room, name) for room in rooms)


def test_observers_follow_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    prepared = backquant.prepare_qat_fx(
        model, backquant.get_default_qat_qconfig_mapping("x86"), torch.zeros(2, 4)
    )
    prepared.eval()
    prepared(torch.ones(2, 4))
    assert prepared.get_submodule("activation_post_process_0").activation_post_process.max_val == 1


@pytest.mark.parametrize("row", [[0.5, -1.0], [-0.5, 1.0], [1.0, -1.0]])
def test_the_scale_that_is_trained_with(row: list[float]) -> None:
    converted = max(map(abs, row)) / 127.5
    for kind, trained in (
        (backquant.FusedMovingAvgObsFakeQuantize, max(max(row) / 127, -min(row) / 128)),
        (backquant.FakeQuantize, converted),
    ):
        weight = kind(
            backquant.MovingAveragePerChannelMinMaxObserver,
            quant_min=-128,
            quant_max=127,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
        )
        weight(torch.tensor([row]))
        assert weight.scale.item() == pytest.approx(trained)
        assert weight.calculate_qparams()[0].item() == pytest.approx(converted)
