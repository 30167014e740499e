"""A static LSTM is shown as PyTorch's: quantized tensors in, a tuple of them out, with the bits that run."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from backquant.ao.nn import quantizable, quantized
from backquant.ao.quantization import get_default_qconfig_mapping
from backquant.ao.quantization.fx.custom_config import PrepareCustomConfig
from backquant.ao.quantization.quantize_fx import convert_fx, prepare_fx
from torch import nn

import backquant


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
