from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.ao.quantization as ao

import backquant.qconfig
from backquant.qconfig import QConfig
from backquant.qconfig import build as named


@pytest.mark.parametrize("name", named.__all__)
def test_the_named_defaults_equal_the_oracles(
    name: str, assert_same_qconfig: Callable[[Any, Any], None]
) -> None:
    ours = getattr(backquant.qconfig, name)
    assert isinstance(ours, QConfig)
    assert_same_qconfig(ours, getattr(ao, name))


def test_every_named_default_of_the_oracle_is_here() -> None:
    wanted = {n for n in ao.qconfig.__all__ if isinstance(getattr(ao, n, None), ao.QConfig)}
    assert wanted <= set(named.__all__)
    assert len(wanted) >= 22
