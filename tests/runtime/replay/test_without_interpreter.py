from __future__ import annotations

import pytest
import torch

from backquant.runtime.replay import Replays, program


def test_without_torchs_interpreter_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_missing", "torch._C.parse_ir")
    replays = Replays(torch.nn.ReLU())
    x = torch.tensor([-1.0, 2.0])
    assert [replays(x).tolist() for _ in range(3)] == [[0.0, 2.0]] * 3
    assert replays.programs == 0
    assert replays.refused.endswith("has no torch._C.parse_ir: calls are not recorded")
