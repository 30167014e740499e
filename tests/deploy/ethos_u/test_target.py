"""Files for Arm's Ethos-U, compiled by Vela; what it leaves to the CPU is listed with both reasons."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.deploy.ethos_u import target

VELA = importlib.util.find_spec


def _quantized(model: nn.Module, x: torch.Tensor) -> Any:
    return backquant.quantize(model.eval(), x, backend="litert", calibration=[x])


def test_a_small_network_runs_on_the_npu_as_a_whole(tmp_path: Path) -> None:
    x = torch.rand(1, 3, 16, 16)
    layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = _quantized(nn.Sequential(*layers, nn.Linear(8, 4), nn.Softmax(-1)), x)
    path = tmp_path / "net.tflite"
    exported = backquant.export(model, path, to="ethos-u", options={"accelerator": "ethos-u65-256"})
    assert {file.name for file in exported.files} == {
        "net.tflite",
        "net_vela.tflite",
        "net.qparams.json",
    }
    assert {*exported.edges} == {"input", "output 0"}
    kinds = {each.kernel.partition(" ")[0] for each in exported.kernels}
    assert kinds.isdisjoint({"QUANTIZE", "DEQUANTIZE"})
    assert exported.figures["operators on the CPU"] == 0
    assert exported.figures["operators on the NPU"] > 5
    assert exported.figures["cycles"] > 0
    assert exported.integer == exported.expected
    assert not exported.left_in_float
    assert exported.runtime.startswith("ethos-u65-256, Vela ")


def test_what_vela_leaves_to_the_cpu_is_listed_with_both_reasons(tmp_path: Path) -> None:
    """LiteRT has a kernel of log-softmax on integers, the NPU has none."""
    x = torch.rand(1, 4, 8, 8)
    model = _quantized(nn.Sequential(nn.Conv2d(4, 4, 3), nn.LogSoftmax(1)), x)
    exported = backquant.export(model, tmp_path / "net.tflite", to="ethos-u")
    [reason] = exported.undelegated
    assert (reason.asked, reason.admitted) == (
        "LOG_SOFTMAX, which litert admits",
        "Vela: Unsupported opType",
    )
    assert list(exported.left_in_float) == [reason]
    assert exported.figures["operators on the CPU"] == 1
    with pytest.raises(backquant.CoverageError, match="ethos-u55-128, Vela"):
        backquant.export(model, tmp_path / "other.tflite", to="ethos-u", require=("1",))


def test_accelerators_are_checked_by_name(tmp_path: Path) -> None:
    x = torch.rand(1, 4)
    model = _quantized(nn.Sequential(nn.Linear(4, 2)), x)
    options = {"accelerator": "ethos-u55-129"}
    with pytest.raises(backquant.UsageError, match="did you mean 'ethos-u55-128'"):
        backquant.export(model, tmp_path / "net.tflite", to="ethos-u", options=options)


def test_without_vela_the_file_is_written_and_said_not_to_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        return None if name == "ethosu" else VELA(name)

    monkeypatch.setattr(target.importlib.util, "find_spec", missing)
    x = torch.rand(1, 4)
    model = _quantized(nn.Sequential(nn.Linear(4, 2)), x)
    exported = backquant.export(model, tmp_path / "net.tflite", to="ethos-u")
    assert "not compiled: ethos-u-vela is not installed" in exported.runtime
    assert tmp_path / "net.tflite" in exported.files and len(exported.files) == 2


def test_what_cannot_be_integers_at_the_edges_stays_float(tmp_path: Path) -> None:
    x = torch.rand(1, 4)
    model = _quantized(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), x)
    exported = backquant.export(model, tmp_path / "net.tflite", to="ethos-u", require=0.0)
    assert {*exported.edges} == {"input"}
    with pytest.raises(backquant.ConfigError, match="output 0 cannot be integers"):
        backquant.export(model, tmp_path / "all.tflite", to="ethos-u", integer_io=True)
    floats = backquant.export(
        model, tmp_path / "none.tflite", to="ethos-u", integer_io=False, require=0.0
    )
    assert floats.edges == {}
