from __future__ import annotations

import pytest
import torch
from torch import nn

from backquant.errors import InputError
from backquant.lower.kernels.recurrent import (
    CellConfig,
    QuantizedCell,
    QuantizedRecurrent,
    RecurrentConfig,
)

ENGINES = ("fbgemm", "x86", "onednn", "qnnpack")


def _tensors(module: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, value in module.named_parameters():
        tensor = value.detach()
        found[name] = tensor
        if name.startswith("weight"):
            scale = tensor.abs().max().reshape(1) / 127
            integers = (tensor / scale).round().to(torch.int8)
            found[name] = integers if dtype == torch.int8 else tensor.half()
            found[f"{name}_scale"] = scale
            found[f"{name}_zero_point"] = torch.zeros(1, dtype=torch.int64)
    return found


def _layer(module: nn.RNNBase, engine: str, dtype: torch.dtype = torch.int8) -> QuantizedRecurrent:
    config = RecurrentConfig(
        module.mode.lower(),
        engine,
        dtype,
        module.hidden_size,
        module.num_layers,
        module.batch_first,
        module.bidirectional,
        engine != "qnnpack",
    )
    return QuantizedRecurrent(config, _tensors(module, dtype))


def _flat(result) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in _flat(part)]


def _close(ours, theirs, atol: float) -> bool:
    pairs = list(zip(_flat(ours), _flat(theirs), strict=True))
    return all(a.shape == b.shape and torch.allclose(a, b, atol=atol) for a, b in pairs)


LAYERS = [
    {},
    {"num_layers": 2},
    {"bidirectional": True, "batch_first": True},
    {"num_layers": 2, "bidirectional": True},
    {"bias": False},
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", LAYERS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_layers_are_near_the_float_layer(kind, options, engine):
    module = kind(8, 16, **options)
    kernel, x = _layer(module, engine), torch.randn(5, 3, 8)
    with torch.no_grad():
        assert _close(kernel(x), module(x), 0.03)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_float16_weights(kind):
    module = kind(8, 16, 2, bidirectional=True)
    kernel, x = _layer(module, "fbgemm", torch.float16), torch.randn(5, 3, 8)
    assert "float16" in kernel.name
    with torch.no_grad():
        assert _close(kernel(x), module(x), 1e-3)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_given_state_and_a_single_sequence(kind, batch_first):
    module = kind(8, 16, 2, batch_first=batch_first)
    kernel = _layer(module, "fbgemm")
    x = torch.randn(3, 5, 8)
    batch = 3 if batch_first else 5
    hidden = torch.randn(2, batch, 16)
    state = (hidden, torch.randn(2, batch, 16)) if kind is nn.LSTM else hidden
    one = torch.randn(6, 8)
    first = tuple(s[:, 0] for s in state) if kind is nn.LSTM else hidden[:, 0]
    with torch.no_grad():
        assert _close(kernel(x, state), module(x, state), 0.03)
        assert _close(kernel(one), module(one), 0.03)
        assert _close(kernel(one, first), module(one, first), 0.03)


@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences(kind, enforce_sorted):
    module = kind(8, 16, 2, bidirectional=True)
    kernel = _layer(module, "fbgemm")
    lengths = torch.tensor([6, 4, 1] if enforce_sorted else [4, 6, 1])
    x = torch.randn(6, 3, 8)
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=enforce_sorted)
    hidden = torch.randn(4, 3, 16)
    state = (hidden, torch.randn(4, 3, 16)) if kind is nn.LSTM else hidden
    with torch.no_grad():
        for arguments in ((packed,), (packed, state)):
            (ours, last), (theirs, expected) = kernel(*arguments), module(*arguments)
            assert torch.equal(ours.batch_sizes, theirs.batch_sizes)
            padded = [nn.utils.rnn.pad_packed_sequence(y)[0] for y in (ours, theirs)]
            assert _close(*padded, 0.03)
            assert _close(last, expected, 0.03)


CELLS = {
    "lstm": lambda bias: nn.LSTMCell(8, 16, bias),
    "gru": lambda bias: nn.GRUCell(8, 16, bias),
    "rnn_tanh": lambda bias: nn.RNNCell(8, 16, bias),
    "rnn_relu": lambda bias: nn.RNNCell(8, 16, bias, nonlinearity="relu"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_cells_are_near_the_float_cell(kind, bias, engine):
    module = CELLS[kind](bias)
    kernel = QuantizedCell(CellConfig(kind, engine, torch.int8, 16), _tensors(module, torch.int8))
    x, hidden = torch.randn(3, 8), torch.randn(3, 16)
    state = (hidden, torch.randn(3, 16)) if kind == "lstm" else hidden
    one = tuple(s[0] for s in state) if kind == "lstm" else hidden[0]
    with torch.no_grad():
        for arguments in ((x,), (x, state), (x[0],), (x[0], one)):
            assert _close(kernel(*arguments), module(*arguments), 0.05)


def test_float16_cells():
    module = nn.LSTMCell(8, 16)
    config = CellConfig("lstm", "x86", torch.float16, 16)
    kernel, x = QuantizedCell(config, _tensors(module, torch.float16)), torch.randn(3, 8)
    with torch.no_grad():
        assert _close(kernel(x), module(x), 1e-3)


def test_states_of_a_wrong_shape_are_refused():
    layer = _layer(nn.LSTM(8, 16), "fbgemm")
    x, good = torch.randn(5, 3, 8), torch.zeros(1, 3, 16)
    with pytest.raises(InputError, match=r"has the shapes \[\(1, 3, 16\), \(1, 2, 16\)\]"):
        layer(x, (good, torch.zeros(1, 2, 16)))
    with pytest.raises(InputError, match="hidden state"):
        layer(x, good)
    with pytest.raises(InputError, match="2 or 3 dimensions, got 4"):
        layer(x.unsqueeze(0))
    cell = nn.GRUCell(8, 16)
    kernel = QuantizedCell(CellConfig("gru", "fbgemm", torch.int8, 16), _tensors(cell, torch.int8))
    with pytest.raises(InputError, match=r"expected \[\(3, 16\)\]"):
        kernel(torch.randn(3, 8), torch.zeros(2, 16))
    with pytest.raises(InputError, match="1 or 2 dimensions, got 3"):
        kernel(x)
