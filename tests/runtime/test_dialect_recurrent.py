"""Recurrent layers are shown as PyTorch's, with the bits that run.

Static ones take and give quantized tensors, dynamic ones floats.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized.dynamic
import torch.ao.quantization.quantize_fx
from backquant.ao.nn import quantizable, quantized
from backquant.ao.quantization import get_default_qconfig_mapping
from backquant.ao.quantization.fx.custom_config import PrepareCustomConfig
from backquant.ao.quantization.quantize_fx import convert_fx, prepare_fx
from torch import nn

import backquant
import backquant.ao


class Reader(nn.Module):
    """Reads the result of an LSTM in one of the ways that models do."""

    def __init__(self, reads: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reads, self.lstm = reads, nn.LSTM(6, 6, **options)
        sides = 2 if options.get("bidirectional") else 1
        self.fc, self.state, self.same = nn.Linear(6 * sides, 3), nn.Linear(6, 3), nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        result = self.lstm(x)
        if self.reads == "each":
            out, (h, c) = result
            return self.fc(out), self.state(h), self.state(c)
        if self.reads == "float":
            return result[0].cumsum(0), result[1][1]
        return self.same(result if self.reads == "all" else result[1])


def converted(model: nn.Module) -> tuple[Any, torch.Tensor]:
    x = torch.randn(5, 2, 6)
    custom = PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, quantizable.LSTM)
    mapping = get_default_qconfig_mapping()
    prepared = prepare_fx(model.eval(), mapping, (x,), prepare_custom_config=custom)
    prepared(x)
    return convert_fx(prepared), x


def leaves(value: Any) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(value)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}])
@pytest.mark.parametrize("reads", ["each", "float", "all", "states"])
def test_it_gives_the_bits_that_run(reads: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, x = converted(Reader(reads, **options))
    assert type(model.lstm) is quantized.LSTM
    expected = leaves(model(x))
    seen: list[Any] = []
    again = copy.deepcopy(model)
    again.lstm.register_forward_hook(lambda _, given, out: seen.extend((given[0], *leaves(out))))
    backquant.save(model, tmp_path / "model.bq")
    results = [again(x), pickle.loads(pickle.dumps(model))(x), model._literally(x)]
    results.append(backquant.load(tmp_path / "model.bq")(x))
    for result in results:
        assert all(map(torch.equal, leaves(result), expected))
    assert seen[0].is_quantized
    if not options or reads == "each":
        assert all(tensor.is_quantized for tensor in seen)
    model.load_state_dict(model.state_dict())
    assert all(map(torch.equal, leaves(model._literally(x)), expected))


def test_in_eager_mode_quantized_tensors_pass_through_it() -> None:
    from backquant.ao.quantization import (
        DeQuantStub,
        QuantStub,
        convert,
        get_default_qconfig,
        prepare,
    )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.lstm, self.dequant = QuantStub(), nn.LSTM(4, 3), DeQuantStub()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dequant(self.lstm(self.quant(x))[0])

    model, x = Model().eval(), torch.randn(5, 2, 4)
    model.qconfig = get_default_qconfig("qnnpack")
    prepared = prepare(model)
    prepared(x)
    assert (convert(prepared)(x) - model(x)).abs().max() < 0.05


def test_a_dynamic_layer_that_is_called_twice_is_no_lstm() -> None:
    from backquant.ao.quantization import default_dynamic_qconfig

    layer, x = nn.Sequential(nn.Linear(5, 5), nn.ReLU()), torch.randn(5, 5)
    prepared = prepare_fx(nn.Sequential(layer, layer).eval(), {"": default_dynamic_qconfig}, (x,))
    model = convert_fx(prepared)
    assert len([node for node in model.graph.nodes if node.op == "call_module"]) == 2
    assert torch.equal(model(x), model._literally(x))


class Between(nn.Module):
    """A recurrent layer or cell between floats, and a linear layer that reads its result."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = kind(8, 16, **options)
        self.fc = nn.Linear(32 if options.get("bidirectional") else 16, 4)
        self.gives_one = kind in (nn.GRUCell, nn.RNNCell)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.rnn(x)
        return self.fc(out if self.gives_one else out[0])


def dynamic(ao: Any, qconfig: str, kind: Any, **options: Any) -> tuple[Any, torch.Tensor]:
    x = torch.randn(3, 8) if issubclass(kind, nn.RNNCellBase) else torch.randn(5, 3, 8)
    mapping = ao.quantization.QConfigMapping().set_global(getattr(ao.quantization, qconfig))
    prepare, convert = (
        ao.quantization.quantize_fx.prepare_fx,
        ao.quantization.quantize_fx.convert_fx,
    )
    return convert(prepare(Between(kind, **options).eval(), mapping, (x,))), x


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # PyTorch's own, of its cells
@pytest.mark.parametrize(
    "qconfig", ["default_dynamic_qconfig", "float16_dynamic_qconfig", "per_channel_dynamic_qconfig"]
)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {}),
        (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
        (nn.GRU, {"batch_first": True}),
        (nn.LSTMCell, {}),
        (nn.GRUCell, {}),
        (nn.RNNCell, {"nonlinearity": "relu"}),
    ],
)
def test_a_dynamic_one_is_shown_as_pytorchs(
    kind: Any, options: dict[str, Any], qconfig: str
) -> None:
    theirs, x = dynamic(torch.ao, qconfig, kind, **options)
    model, _ = dynamic(backquant.ao, qconfig, kind, **options)
    assert type(model.rnn) is getattr(backquant.nn.quantized.dynamic, kind.__name__)
    assert model.rnn._get_name() == theirs.rnn._get_name()
    assert repr(model.rnn) == repr(theirs.rnn)
    assert [(n.op, n.target) for n in model.graph.nodes] == [
        (n.op, n.target) for n in theirs.graph.nodes
    ]
    assert list(model.rnn.get_weight()) == list(theirs.rnn.get_weight())
    assert list(model.rnn.get_bias()) == list(theirs.rnn.get_bias())
    for name, weight in theirs.rnn.get_weight().items():
        assert torch.equal(model.rnn.get_weight()[name].dequantize().float(), weight.dequantize())
    expected = theirs(x)
    fresh, _ = dynamic(backquant.ao, qconfig, kind, **options)
    fresh.load_state_dict(theirs.state_dict())
    seen: list[Any] = []
    again = copy.deepcopy(model)
    again.rnn.register_forward_hook(lambda *_: seen.append(1))
    results = [
        model(x),
        model._literally(x),
        fresh(x),
        pickle.loads(pickle.dumps(model))(x),
        again(x),
    ]
    assert all(torch.equal(result, expected) for result in results)
    assert seen == [1]


def test_a_dynamic_one_takes_another_weight() -> None:
    model, x = dynamic(backquant.ao, "default_dynamic_qconfig", nn.GRU)
    before = model(x)
    held = {**model.rnn.get_weight(), **model.rnn.get_bias()}
    model.rnn.set_weight_bias(held)
    assert torch.equal(model(x), before)
    model.rnn.set_weight_bias({**held, "bias_ih_l0": torch.ones(48)})
    assert not torch.equal(model(x), before)
