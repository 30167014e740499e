"""Quantized LSTM, cell and attention, against the float modules and ``torch.ao``'s int8 kernels."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.ao.nn.quantizable as oracle_observed
import torch.ao.nn.quantized as oracle
from torch import nn

from backquant.errors import ConfigError
from backquant.nn import quantizable, quantized
from backquant.nn.quantized.quantize_dequantize import QuantizeDequantize


@pytest.fixture
def qconfig() -> Any:
    from torch.ao.quantization import MinMaxObserver, QConfig

    weight = MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
    return QConfig(activation=MinMaxObserver.with_args(quant_min=0, quant_max=127), weight=weight)


def _observed(module: nn.Module, cls: Any, qconfig: Any, *inputs: torch.Tensor) -> Any:
    module.eval().qconfig = qconfig
    observed = cls.from_float(module)
    observed(*inputs)
    return observed


OPTIONS: list[dict[str, Any]] = [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}]


@pytest.mark.filterwarnings("ignore:All inputs of this cat operator must share")
@pytest.mark.parametrize("options", OPTIONS)
def test_lstm_is_close_to_float_and_to_the_int8_kernels(
    options: dict[str, Any], qconfig: Any
) -> None:
    lstm, x = nn.LSTM(8, 16, **options), torch.randn(10, 4, 8)
    ours = quantized.LSTM.from_observed(_observed(lstm, quantizable.LSTM, qconfig, x))
    reference = lstm(x)[0]
    scale, zero_point = float(x.max() - x.min()) / 127, 64
    rounded = torch.quantize_per_tensor(x, scale, zero_point, torch.quint8)
    theirs = oracle.LSTM.from_observed(_observed(lstm, oracle_observed.LSTM, qconfig, x))
    kernels = theirs(rounded)[0].dequantize()
    output = ours(rounded.dequantize())[0]
    assert (output - kernels).abs().mean() < 0.01
    assert (output - reference).abs().mean() < 0.03
    assert (output - reference).abs().mean() < 1.5 * (kernels - reference).abs().mean()


def test_no_float_linear_and_no_observer_is_left(qconfig: Any) -> None:
    lstm, x = nn.LSTM(3, 4, num_layers=2), torch.randn(5, 2, 3)
    observed = _observed(lstm, quantizable.LSTM, qconfig, x)
    before = copy.deepcopy(observed.state_dict())
    ours = quantized.LSTM.from_observed(observed)
    assert all(torch.equal(before[key], value) for key, value in observed.state_dict().items())
    for module in ours.modules():
        assert not hasattr(module, "calculate_qparams")
        if isinstance(module, nn.Linear):
            assert module.weight.dtype == torch.int8
    cell = ours.layers[0].layer_fw.cell
    assert isinstance(cell.cell_tanh.activation_post_process, QuantizeDequantize)
    assert float(cell.cell_tanh.activation_post_process.scale) == 2 / 256
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(twin) is quantized.LSTM
        assert torch.equal(twin(x)[0], ours(x)[0])


def test_outputs_lie_on_the_grid_of_the_last_observer(qconfig: Any) -> None:
    cell, x = nn.LSTMCell(3, 4), torch.randn(50, 3)
    ours = quantized.LSTMCell.from_observed(_observed(cell, quantizable.LSTMCell, qconfig, x))
    hidden, _ = ours(x)
    grid = ours.ogate_cy.activation_post_process
    steps = hidden / grid.scale
    torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)
    assert (hidden - cell(x)[0]).abs().max() < 0.1


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_attention_is_close_to_float(options: dict[str, Any], qconfig: Any) -> None:
    attention = nn.MultiheadAttention(16, 4, batch_first=True, **options)
    x = torch.randn(3, 6, 16)
    observed = _observed(attention, quantizable.MultiheadAttention, qconfig, x, x, x)
    ours = quantized.MultiheadAttention.from_observed(observed)
    output, reference = ours(x, x, x)[0], attention(x, x, x)[0]
    assert (output - reference).abs().mean() < 0.03
    back = ours.dequantize()
    assert (back.in_proj_weight - attention.in_proj_weight).abs().max() < 0.01
    assert torch.equal(copy.deepcopy(ours)(x, x, x)[0], output)


def test_after_training(own_qat_qconfig: Any) -> None:
    lstm, x = nn.LSTM(8, 16), torch.randn(10, 4, 8)
    lstm.qconfig = own_qat_qconfig
    trained = quantizable.LSTM.from_float(lstm.train())
    for _ in range(3):
        trained(x)[0].sum().backward()
    ours = quantized.LSTM.from_observed(trained)
    assert not ours.training and trained.training
    trained.eval()
    assert (ours(x)[0] - trained(x)[0]).abs().mean() < 0.02


@pytest.mark.parametrize("name", ["LSTM", "LSTMCell", "MultiheadAttention"])
def test_refusals(name: str) -> None:
    arguments = (2, 1)
    plain = getattr(nn, name)(*arguments)
    with pytest.raises(ConfigError, match="is made of an observed module") as error:
        getattr(quantized, name).from_float(plain)
    assert "from_observed" in error.value.fix
    with pytest.raises(ConfigError, match=f"takes a quantizable.{name} that from_float made"):
        getattr(quantized, name).from_observed(plain)
    with pytest.raises(ConfigError, match="that from_float made"):
        getattr(quantized, name).from_observed(getattr(quantizable, name)(*arguments))
