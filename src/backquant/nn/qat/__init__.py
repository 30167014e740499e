"""Modules that train with a fake-quantized weight."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from backquant.nn.qat.conv import Conv1d, Conv2d, Conv3d
from backquant.nn.qat.embedding import Embedding, EmbeddingBag
from backquant.nn.qat.linear import Linear

if TYPE_CHECKING:
    from backquant.nn.qat import dynamic

__all__ = ["Conv1d", "Conv2d", "Conv3d", "Embedding", "EmbeddingBag", "Linear", "dynamic"]


def __getattr__(name: str) -> Any:
    if name == "dynamic":
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
