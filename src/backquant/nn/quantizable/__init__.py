"""Modules rebuilt from parts, so that observers reach their inside."""

from __future__ import annotations

from backquant.nn.quantizable.attention import MultiheadAttention
from backquant.nn.quantizable.lstm import LSTM
from backquant.nn.quantizable.lstm_cell import LSTMCell

__all__ = ["LSTM", "LSTMCell", "MultiheadAttention"]
