"""Where pickles written before the room ``backquant.runtime`` look for the class of models."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("backquant.runtime.quantized_model"), name)
