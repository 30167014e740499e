"""``make bench-quick``: one row of its table, of a tiny model."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import models, quick, speed, worker
from benchmarks.models import Entry
from benchmarks.results import Row, sqnr
from torch import nn


class Tiny(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        convolutions = (nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU())
        super().__init__(*convolutions, nn.Flatten(), nn.Linear(16 * 12 * 12, 10))


def test_a_row_of_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKQUANT_KERNELS", "off")  # the peer sets it, and it is set back
    monkeypatch.setitem(models.MODELS, "tiny", Entry(Tiny, lambda n: torch.randn(n, 3, 16, 16)))
    speed.set_up("tiny", tmp_path)
    rows = []
    for peer in ("fp32", quick.PEER, quick.OURS):
        task = Namespace(model="tiny", workspace=tmp_path, threads=1, peer=peer)
        with torch.no_grad():
            prepared, inputs, facts = worker.prepare(task)
            times = worker.timed(prepared, prepared.feed(inputs[0]), 3)["cpu"]
        assert len(times) == 3 and min(times) > 0
        outputs = np.load(tmp_path / f"{peer}.npy")
        reference = outputs if peer == "fp32" else np.load(tmp_path / "fp32.npy")
        quality = None if peer == "fp32" else sqnr(reference, outputs)
        rows.append(Row("tiny", peer, tuple(1e3 * t for t in times), quality, facts=facts))
    text, ratio = quick.line(rows)
    assert ratio is not None and ratio > 0
    assert [row.sqnr is not None and row.sqnr > 10 for row in rows[1:]] == [True, True]
    name, *figures = [cell.strip() for cell in text.strip("|").split("|")]
    assert name == "tiny" and figures[2] == f"{ratio:.2f}" and len(figures) == 4


def test_a_peer_that_fails_is_named() -> None:
    rows = [Row("tiny", "fp32", (1.0,)), Row("tiny", quick.OURS, (0.5,), 30.0)]
    text, ratio = quick.line([*rows, Row("tiny", quick.PEER, failed="no such file")])
    assert ratio is None and "ort_int8: no such file" in text


def test_models_without_time_are_left_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(model: str, *_: object) -> list[Row]:
        return [Row(model, peer, (2.0,), 30.0) for peer in ("fp32", quick.PEER, quick.OURS)]

    monkeypatch.setattr(quick, "measure", measured)
    assert quick.main(["--out", str(tmp_path)]) == 0
    assert quick.main(["--out", str(tmp_path), "--budget", "-1"]) == 1
    said = capsys.readouterr().out
    assert "| geometric mean | | | 1.00 | |" in said
    assert f"no time was left for: {', '.join(quick.MODELS)}" in said
    assert (tmp_path / "quick.json").exists()
