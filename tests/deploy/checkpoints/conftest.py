"""What others load: quietly, since libraries warn of their own business."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn


@pytest.fixture
def opened() -> Callable[..., nn.Module]:
    """transformers' model of a folder."""

    def load(folder: Path, **options: Any) -> nn.Module:
        from transformers import AutoModelForCausalLM

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AutoModelForCausalLM.from_pretrained(folder, **options).eval()

    return load
