from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from backquant.deploy import find_target, target
from backquant.errors import UsageError


def test_a_target_that_is_none(monkeypatch: pytest.MonkeyPatch, snapshot: Any, tmp_path) -> None:
    point = EntryPoint("pi", "math:pi", "backquant.targets")
    monkeypatch.setattr(target.metadata, "entry_points", lambda **_: [point])
    with pytest.raises(UsageError) as caught:
        find_target("pi", tmp_path / "model.pi")
    snapshot("no-target", caught.value)
