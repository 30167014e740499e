"""The bar on the terminal."""

from __future__ import annotations

import torch

from backquant.calibrate import ProgressBar, calibrate


def test_the_bar_counts(makers, capsys):
    prepared = makers.prepare(makers.conv_net().eval())
    with ProgressBar("measuring") as progress:
        calibrate(prepared, [torch.randn(1, 3, 4, 4)] * 2, progress=progress)
        task = progress._bar.tasks[0]
        assert (task.completed, task.total) == (2, 2)
    assert "measuring" in capsys.readouterr().err
