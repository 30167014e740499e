"""An LSTM rebuilt from cells that observers reach."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from backquant.errors import ConfigError, InputError
from backquant.nn.quantizable.lstm_cell import LSTMCell, State, require_float
from backquant.nn.quantizable.observing import observe, require_qconfig


class _Direction(nn.Module):
    """One layer in one direction: the cell, over the first axis of its input."""

    def __init__(self, cell: LSTMCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        outputs = []
        for step in x:
            state = self.cell(step, state)
            outputs.append(state[0])
        return torch.stack(outputs), state


class _Layer(nn.Module):
    """One layer, forward and perhaps backward in time."""

    def __init__(self, forward: LSTMCell, backward: LSTMCell | None) -> None:
        super().__init__()
        self.layer_fw = _Direction(forward)
        if backward is not None:
            self.layer_bw = _Direction(backward)

    def forward(self, x: torch.Tensor, states: list[State]) -> tuple[torch.Tensor, list[State]]:
        output, state = self.layer_fw(x, states[0])
        if len(states) == 1:
            return output, [state]
        reverse, reverse_state = self.layer_bw(x.flip(0), states[1])
        return torch.cat([output, reverse.flip(0)], -1), [state, reverse_state]


class LSTM(nn.Module):
    """``nn.LSTM`` of quantizable cells: inputs ``(L, N, input_size)``, ``(N, L, …)`` or ``(L, …)``.

    Dropout between layers acts in training mode, as in ``nn.LSTM``; PyTorch's quantizable LSTM has
    none. Packed sequences are refused with ``InputError``.

    >>> lstm = LSTM(3, 4, num_layers=2, bidirectional=True)
    >>> output, (hidden, cell) = lstm(torch.zeros(5, 2, 3))
    >>> output.shape, hidden.shape
    (torch.Size([5, 2, 8]), torch.Size([4, 2, 4]))
    """

    _FLOAT_MODULE = nn.LSTM

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        split_gates: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(dropout, bool) or not 0 <= dropout <= 1:
            raise ConfigError(
                f"dropout is a probability, got {dropout!r}",
                where="quantizable.LSTM(..., dropout=...)",
                fix="dropout=0.0",
            )
        self.input_size, self.hidden_size = input_size, hidden_size
        self.num_layers, self.bias = num_layers, bias
        self.batch_first, self.dropout = batch_first, float(dropout)
        self.bidirectional = bidirectional

        def cell(size: int) -> LSTMCell:
            return LSTMCell(size, hidden_size, bias, device, dtype, split_gates=split_gates)

        layers = []
        for layer in range(num_layers):
            size = hidden_size * (1 + bidirectional) if layer else input_size
            layers.append(_Layer(cell(size), cell(size) if bidirectional else None))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, hidden: State | None = None) -> tuple[torch.Tensor, State]:
        """Output and the two states, of the shapes of ``nn.LSTM``."""
        if isinstance(x, PackedSequence):
            raise InputError(
                "a quantizable LSTM takes no packed sequence",
                where="backquant.nn.quantizable.LSTM.forward",
                fix="torch.nn.utils.rnn.pad_packed_sequence(x)[0]",
            )
        batched = x.dim() == 3
        time_axis = 1 if batched and self.batch_first else 0
        steps = x.transpose(0, time_axis)
        states = self._states(steps, hidden)
        directions = 1 + self.bidirectional
        output, last = steps, []
        for index, layer in enumerate(self.layers):
            own = states[index * directions : (index + 1) * directions]
            output, new = layer(output, own)
            last += new
            if index + 1 < self.num_layers:
                output = F.dropout(output, self.dropout, self.training)
        hx, cx = (torch.stack(parts) for parts in zip(*last, strict=True))
        return output.transpose(0, time_axis), (hx, cx)

    def _states(self, steps: torch.Tensor, hidden: State | None) -> list[State]:
        """One pair of states per layer and direction."""
        count = self.num_layers * (1 + self.bidirectional)
        if hidden is None:
            zeros = steps.new_zeros(*steps.shape[1:-1], self.hidden_size)
            return [(zeros, zeros)] * count
        return list(zip(hidden[0].unbind(0), hidden[1].unbind(0), strict=True))

    def _get_name(self) -> str:
        return "QuantizableLSTM"

    @classmethod
    def from_float(cls, other: nn.Module, qconfig: Any = None, split_gates: bool = False) -> LSTM:
        """The observed form of an ``nn.LSTM`` with a ``qconfig`` (or with the one given), in its mode.

        In training mode it is fake-quantized. Raises ``ConfigError`` for another type, without
        ``qconfig``, and for ``proj_size`` (which PyTorch's ignores).
        """
        float_lstm = require_float(cls, other, cls._FLOAT_MODULE)
        chosen = require_qconfig(other, "quantizable.LSTM", qconfig)
        if float_lstm.proj_size:
            raise ConfigError(
                "a quantizable LSTM has no projections",
                where=f"{float_lstm}",
                fix="torch.nn.LSTM(..., proj_size=0)",
            )
        lstm = cls(
            float_lstm.input_size,
            float_lstm.hidden_size,
            float_lstm.num_layers,
            float_lstm.bias,
            float_lstm.batch_first,
            float_lstm.dropout,
            float_lstm.bidirectional,
            device="meta",
            split_gates=split_gates,
        )
        for index, layer in enumerate(lstm.layers):
            for name, suffix in (("layer_fw", ""), ("layer_bw", "_reverse")):
                if hasattr(layer, name):
                    params = _params(float_lstm, f"l{index}{suffix}")
                    cell = LSTMCell.from_params(*params, split_gates)
                    getattr(layer, name).cell = cell
        lstm.qconfig = chosen
        lstm.train(other.training)
        observe(lstm, chosen)
        return lstm


def _params(lstm: nn.LSTM, suffix: str) -> tuple[Any, Any, Any, Any]:
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    found = [getattr(lstm, f"{name}_{suffix}", None) for name in names]
    return found[0], found[1], found[2], found[3]
