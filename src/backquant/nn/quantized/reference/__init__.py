"""Modules with integer weights that compute in float: what convert puts into a reference model."""

from __future__ import annotations

from backquant.nn.quantized.reference.cells import GRUCell, LSTMCell, RNNCell
from backquant.nn.quantized.reference.conv import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from backquant.nn.quantized.reference.embedding import Embedding, EmbeddingBag
from backquant.nn.quantized.reference.integer_weights import IntegerWeights
from backquant.nn.quantized.reference.linear import Linear
from backquant.nn.quantized.reference.module import ReferenceModule
from backquant.nn.quantized.reference.recurrent import GRU, LSTM

__all__ = [
    "GRU",
    "LSTM",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Embedding",
    "EmbeddingBag",
    "GRUCell",
    "IntegerWeights",
    "LSTMCell",
    "Linear",
    "RNNCell",
    "ReferenceModule",
]
