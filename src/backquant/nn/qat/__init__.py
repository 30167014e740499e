"""Modules that train with a fake-quantized weight."""

from __future__ import annotations

from backquant.nn.qat.conv import Conv1d, Conv2d, Conv3d
from backquant.nn.qat.embedding import Embedding, EmbeddingBag
from backquant.nn.qat.linear import Linear

__all__ = ["Conv1d", "Conv2d", "Conv3d", "Embedding", "EmbeddingBag", "Linear"]
