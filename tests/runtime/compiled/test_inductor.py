from __future__ import annotations

from collections.abc import Callable

import pytest

from backquant.errors import EngineError
from backquant.runtime.compiled import inductor


def test_a_torch_without_the_templates(
    monkeypatch: pytest.MonkeyPatch, snapshot: Callable[..., None]
) -> None:
    monkeypatch.setattr(inductor, "_missing", "cannot import name 'CppTemplate'")
    with pytest.raises(EngineError) as caught:
        inductor.check_inductor()
    snapshot("no-inductor", caught.value)
