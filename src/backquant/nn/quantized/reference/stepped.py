"""``nn.LSTM`` on integer weights, as kernels compute it that quantize the hidden state at each step."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from backquant.nn.quantized.reference.recurrent import LSTM

_State = tuple[torch.Tensor, torch.Tensor]


def lstm_step_by_step(
    lstm: LSTM, input: torch.Tensor, hx: _State | None = None
) -> tuple[torch.Tensor, _State]:
    """What ``lstm`` gives for ``input`` and the state ``hx``, float32, in shapes as ``nn.LSTM`` has them.

    What each layer reads is rounded to 8 bits of its range in this call, the hidden state to 8 bits of its
    range at each step. ``proj_size`` is 0; dropout is left out.

    >>> from torch import nn
    >>> qparams = {"qscheme": torch.per_tensor_affine, "dtype": torch.qint8, "scale": 0.01,
    ...            "zero_point": 0}
    >>> lstm = LSTM.from_float(nn.LSTM(3, 4), {"weight_ih_l0": qparams, "weight_hh_l0": qparams})
    >>> x = torch.rand(5, 1, 3)
    >>> torch.allclose(lstm_step_by_step(lstm, x)[0], lstm(x)[0], atol=0.01)
    True
    """
    whole: Any = lstm
    single = input.dim() == 2
    value = input.unsqueeze(1) if single else input
    if whole.batch_first and not single:
        value = value.transpose(0, 1)
    directions = 2 if whole.bidirectional else 1
    count = directions * whole.num_layers
    if hx is None:
        zeros = value.new_zeros(count, value.shape[1], whole.hidden_size)
        hidden, cell = zeros, zeros
    else:
        hidden, cell = (each.unsqueeze(1) if single else each for each in hx)
    states: list[_State] = []
    for layer in range(whole.num_layers):
        found = []
        for reverse in range(directions):
            place = layer * directions + reverse
            weights = _weights(whole, f"_l{layer}" + "_reverse" * reverse)
            sequence = value.flip(0) if reverse else value
            result, state = _direction(sequence, (hidden[place], cell[place]), weights)
            found.append(result.flip(0) if reverse else result)
            states.append(state)
        value = torch.cat(found, -1)
    last = torch.stack([state[0] for state in states]), torch.stack([state[1] for state in states])
    if single:
        return value.squeeze(1), (last[0].squeeze(1), last[1].squeeze(1))
    return value.transpose(0, 1) if whole.batch_first else value, last


def _weights(lstm: Any, suffix: str) -> list[torch.Tensor | None]:
    flat = dict(zip(lstm._flat_weights_names, lstm.get_flat_weights(), strict=True))
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return [flat.get(f"{name}{suffix}") for name in names]


def _direction(x: torch.Tensor, state: _State, weights: list[Any]) -> tuple[torch.Tensor, _State]:
    """One layer in one direction; ``x``: ``[steps, batch, features]``."""
    of_input, of_hidden, input_bias, hidden_bias = weights
    gates = F.linear(_rounded(x), of_input, input_bias)
    hidden, cell = state
    found = []
    for step in gates:
        sums = step + F.linear(_rounded(hidden), of_hidden, hidden_bias)
        into, forget, new, out = sums.chunk(4, -1)
        cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
        hidden = out.sigmoid() * cell.tanh()
        found.append(hidden)
    return torch.stack(found), (hidden, cell)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """``x`` to 256 values between its least and its greatest, zero among them."""
    if not x.numel():
        return x
    least, greatest = (end.item() for end in torch.aminmax(x))
    scale = (max(greatest, 0.0) - min(least, 0.0)) / 255
    if not scale > 0:
        return x
    zero_point = round(-min(least, 0.0) / scale)
    return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, 0, 255)
