from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import backquant
from backquant.cli.demo import command
from backquant.cli.demo import outcome as digits
from backquant.lower import engine as engines
from backquant.lower.engine import MachineFacts

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One epoch on some of the images."""
    data = digits.load_digits()
    few = digits.Digits(
        data.train_images[:320],
        data.train_labels[:320],
        data.test_images[:64],
        data.test_labels[:64],
    )
    monkeypatch.setattr(digits, "load_digits", lambda: few)
    monkeypatch.setattr(command, "EPOCHS", 1)
    monkeypatch.setattr(command, "BATCHES", (1, 4))


def test_demo(run: Run, here: Path) -> None:
    result = run("demo", "--out", "out/demo")
    assert result.status == 0
    for part in (
        "accuracy",
        "size",
        "latency, batch 1",
        "latency, batch 4",
        "kernels: ",
        "one thread",
    ):
        assert part in result.out, part
    assert "no operator stays float" in result.out
    assert "out/demo/digits.bq   loaded again: the same outputs" in result.out
    assert "training" in result.err and "calibrating" in result.err
    page = (here / "out/demo/report.html").read_text()
    assert "speed at batch 4" in page and "DigitsNet" in page
    model = backquant.load("out/demo/digits.bq")
    assert model.audit().float_weighted == ()
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack", "onednn", "native"])
def test_other_engines(run: Run, backend: str) -> None:
    data = run("demo", "-b", backend, "--json").data
    assert [item["batch"] for item in data["latency"]] == [1, 4]
    assert data["same_when_loaded"] and data["report"]["coverage"] == 1.0
    assert abs(data["accuracy"]["float"] - data["accuracy"]["quantized"]) <= 0.05
    assert data["files"] == {"report": "out/demo/report.html", "artifact": "out/demo/digits.bq"}


@pytest.mark.parametrize("backend", ["tensorrt", "executorch"])
def test_a_reference_model_claims_no_speed(run: Run, here: Path, backend: str) -> None:
    result = run("demo", "-b", backend)
    assert result.status == 0
    assert "latency" not in result.out.replace("so no latency", "") and "faster" not in result.out
    assert f"{backend} is for export only: running it here simulates int8" in result.out
    assert "speed at" not in (here / "out/demo/report.html").read_text()


def test_what_would_fail_after_training_fails_before(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("trained")

    monkeypatch.setattr(command, "_train", never)
    assert run("demo", "-b", "x68").status == 2
    nothing = run("demo", "-b", "qnnpack_pt2e")
    assert nothing.status == 1 and "nothing in this model can be quantized" in nothing.err
    monkeypatch.setattr(engines, "machine_facts", lambda: MachineFacts("aarch64"))
    assert run("demo").status == 2


def test_a_copy_that_computes_something_else_is_a_no(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backquant.cli.demo.outcome.torch.equal", lambda *_: False)
    result = run("demo")
    assert result.status == 1 and "OTHER OUTPUTS" in result.out
