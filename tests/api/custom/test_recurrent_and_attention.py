"""LSTM and attention as custom modules: torch.nn to quantizable to quantized."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.ao.nn.quantizable as torch_quantizable
import torch.ao.nn.quantized as torch_quantized
from torch import nn
from torch.utils import _pytree as pytree

import backquant as bq
from backquant.nn import quantizable, quantized
from backquant.prepare import prepared_state


class Recurrent(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, **options)
        self.fc = nn.Linear(16 * (1 + self.lstm.bidirectional), 3)

    def forward(self, x, hidden, cell):
        output, (hidden, cell) = self.lstm(x, (hidden, cell))
        return self.fc(output), hidden, cell


class WholeTuple(nn.Module):
    """The states are returned as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16)

    def forward(self, x):
        return self.lstm(x)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc = nn.Linear(8, 3)

    def forward(self, x, mask=None):
        output, _ = self.mha(x, x, x, attn_mask=mask, need_weights=False)
        return self.fc(output)


def lstm_inputs(layers: int = 1) -> tuple[torch.Tensor, ...]:
    return torch.randn(6, 4, 8), torch.randn(layers, 4, 16), torch.randn(layers, 4, 16)


def lstm_configs(side: Any) -> tuple[Any, Any]:
    observed, made = (
        (torch_quantizable.LSTM, torch_quantized.LSTM)
        if side.is_torch
        else (quantizable.LSTM, quantized.LSTM)
    )
    prepare = side.config.PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, observed)
    convert = side.config.ConvertCustomConfig()
    return prepare, convert.set_observed_to_quantized_mapping(observed, made)


def test_lstm_is_as_good_as_torchs(both: Any) -> None:
    model, inputs = Recurrent().eval(), lstm_inputs()
    expected = model(*inputs)
    errors = []
    for side in (both.ours, both.theirs):
        prepare, convert = lstm_configs(side)
        prepared = both.feed(side.prepare(model, inputs, prepare), inputs)
        results = side.convert(prepared, convert)(*inputs)
        pairs = zip(results, expected, strict=True)
        errors.append([float((a - b).detach().abs().mean()) for a, b in pairs])
    ours, theirs = errors
    assert all(a < 0.03 and a <= 1.5 * b for a, b in zip(ours, theirs, strict=True))


def test_observers_around_an_lstm(both: Any) -> None:
    """Inputs as in PyTorch. *Different:* no stubs; what reads a part of the result observes it."""
    model, inputs = Recurrent().eval(), lstm_inputs()
    ours = both.ours.prepare(model, inputs, lstm_configs(both.ours)[0])
    theirs = both.theirs.prepare(model, inputs, lstm_configs(both.theirs)[0])
    both.feed(ours, inputs)
    both.feed(theirs, inputs)
    assert type(ours.lstm) is quantizable.LSTM
    for name in ("activation_post_process_0", "activation_post_process_1"):
        for one, two in zip(
            getattr(ours, name).calculate_qparams(),
            getattr(theirs, name).calculate_qparams(),
            strict=True,
        ):
            assert torch.equal(one, two)
    called = [str(n.target) for n in ours.graph.nodes if n.op == "call_module"]
    assert [name.rpartition("_")[2] for name in called] == ["0", "1", "2", "lstm", "3", "fc", "4"]
    inner = {k: v for k, v in ours.lstm.state_dict().items() if k.endswith("min_val")}
    outer = theirs.lstm.state_dict()
    for key, value in inner.items():
        torch.testing.assert_close(value, outer[key], msg=key)


def test_the_linear_behind_runs_on_integers(both: Any) -> None:
    model, inputs = Recurrent().eval(), lstm_inputs()
    prepare, convert = lstm_configs(both.ours)
    prepared = both.feed(both.ours.prepare(model, inputs, prepare), inputs)
    quantized_model = bq.convert_fx(prepared, convert)
    assert [use.nodes for use in quantized_model.kernels] == [("fc",)]
    assert quantized_model.left_in_float == ()
    assert type(quantized_model.graph_module.lstm) is quantized.LSTM


@pytest.mark.parametrize("options", [{"num_layers": 2}, {"bidirectional": True, "bias": False}])
def test_layers_and_directions(both: Any, options: dict[str, Any]) -> None:
    model, inputs = Recurrent(**options).eval(), lstm_inputs(2)
    prepare, _ = lstm_configs(both.ours)
    prepared = both.feed(both.ours.prepare(model, inputs, prepare), inputs)
    results = bq.convert_fx(prepared)(*inputs)  # our classes need not be named
    for result, expected in zip(results, model(*inputs), strict=True):
        assert (result - expected).abs().mean() < 0.03


def test_tuples_and_missing_states(both: Any) -> None:
    """In PyTorch, conversion demands that the states are passed."""
    model, x = WholeTuple().eval(), torch.randn(6, 4, 8)
    prepare, _ = lstm_configs(both.ours)
    prepared = both.feed(both.ours.prepare(model, x, prepare), x)
    output, (hidden, cell) = bq.convert_fx(prepared)(x)
    expected, (expected_hidden, expected_cell) = model(x)
    assert (output - expected).abs().mean() < 0.03
    assert (hidden - expected_hidden).abs().mean() < 0.03
    assert (cell - expected_cell).abs().mean() < 0.05


@pytest.mark.parametrize("item", [None, 1])
def test_a_tuple_that_is_passed_on_is_not_observed(both: Any, item: int | None) -> None:
    """``nn.Identity`` shares qparams between input and output, and a tuple has none."""

    class PassedOn(WholeTuple):
        def __init__(self) -> None:
            super().__init__()
            self.identity = nn.Identity()

        def forward(self, x):
            found = self.lstm(x)
            return self.identity(found if item is None else found[item])

    model, x = PassedOn().eval(), torch.randn(6, 4, 8)
    for side in (both.ours, both.theirs):
        prepared = both.feed(side.prepare(model, x, lstm_configs(side)[0]), x)
        observed = {str(node.args[0]) for node in prepared.graph.nodes if "post" in node.name}
        assert observed == {"x"}
    result = bq.convert_fx(both.feed(both.ours.prepare(model, x, lstm_configs(both.ours)[0]), x))(x)
    for found, expected in zip(
        pytree.tree_leaves(result), pytree.tree_leaves(model(x)), strict=True
    ):
        assert (found - expected).abs().mean() < 0.05


def test_torchs_own_classes_take_quantized_tensors(both: Any) -> None:
    """With PyTorch's classes and observers in our flow: quantized tensors in, nested tuples out."""
    import torch.ao.quantization as tq

    model, inputs = Recurrent().eval(), lstm_inputs()
    asked = tq.QConfig(
        activation=tq.MinMaxObserver.with_args(quant_min=0, quant_max=127),
        weight=tq.default_weight_observer,
    )
    prepare = bq.PrepareCustomConfig()
    prepare.set_float_to_observed_mapping(nn.LSTM, torch_quantizable.LSTM)
    convert = bq.ConvertCustomConfig()
    convert.set_observed_to_quantized_mapping(torch_quantizable.LSTM, torch_quantized.LSTM)
    mapping = bq.QConfigMapping().set_global(asked)
    prepared = both.feed(both.ours.prepare(model, inputs, prepare, mapping), inputs)
    for made in (
        bq.convert_fx(prepared, convert),
        bq.convert_to_reference_fx(prepared, convert),
    ):
        for result, expected in zip(made(*inputs), model(*inputs), strict=True):
            assert result.dtype == torch.float32
            assert (result - expected).abs().mean() < 0.03


def test_attention(both: Any) -> None:
    """PyTorch's flow fails here: it puts an observer on the tuple."""
    model, x = SelfAttention().eval(), torch.randn(2, 5, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    custom = bq.PrepareCustomConfig().set_float_to_observed_mapping(
        nn.MultiheadAttention, quantizable.MultiheadAttention
    )
    theirs_custom = both.theirs.config.PrepareCustomConfig().set_float_to_observed_mapping(
        nn.MultiheadAttention, torch_quantizable.MultiheadAttention
    )
    for inputs in ((x,), (x, mask)):
        prepared = both.feed(both.ours.prepare(model, inputs, custom), inputs)
        names = [str(n.target) for n in prepared.graph.nodes if n.op == "call_module"]
        observed = [name for name in names if name.startswith("activation")]
        assert len(observed) == 3  # the one input, what the linear reads, and what it gives
        result = bq.convert_fx(prepared)
        assert [use.nodes for use in result.kernels] == [("fc",)]
        assert (result(*inputs) - model(*inputs)).abs().mean() < 0.03
    theirs = both.theirs.prepare(model, (x,), theirs_custom)
    with pytest.raises(AttributeError, match="has no attribute 'numel'"):
        theirs(x)


def test_training(both: Any) -> None:
    model, inputs = Recurrent().train(), lstm_inputs()
    custom, convert = lstm_configs(both.ours)
    prepared = bq.prepare_qat_fx(
        model,
        bq.get_default_qat_qconfig_mapping("x86"),
        inputs,
        custom,
        bq.backend_config.get_x86_backend_config(),
    )
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    before = copy.deepcopy(model.state_dict())
    for _ in range(3):
        optimizer.zero_grad()
        prepared(*inputs)[0].square().sum().backward()
        optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    prepared.eval()
    trained = prepared(*inputs)[0]
    result = bq.convert_fx(prepared, convert)(*inputs)[0]
    assert (result - trained).abs().mean() < 0.03


def test_artifact(both: Any, tmp_path: Any) -> None:
    model, inputs = Recurrent().eval(), lstm_inputs()
    custom, _ = lstm_configs(both.ours)
    made = bq.quantize(model, inputs, calibration=[inputs], prepare_custom_config=custom)
    bq.save(made, tmp_path / "model.bq")
    loaded = bq.load(tmp_path / "model.bq")
    for one, two in zip(loaded(*inputs), made(*inputs), strict=True):
        assert torch.equal(one, two)


def test_calibration_is_complete_with_the_observers_inside(both: Any) -> None:
    from backquant.calibrate import (
        calibrate,
        calibration_state,
        load_calibration_state,
        merge_state,
        waiting_for_data,
    )

    model, inputs = Recurrent().eval(), lstm_inputs()
    custom, _ = lstm_configs(both.ours)
    prepared = both.ours.prepare(model, inputs, custom)
    inside = [item.site for item in waiting_for_data(prepared) if item.site.startswith("lstm.")]
    assert "lstm.layers.0.layer_fw.cell.igates.activation_post_process" in inside
    other = copy.deepcopy(prepared)
    assert calibrate(prepared, [inputs]).unseen == ()
    assert waiting_for_data(prepared) == ()
    state = calibration_state(prepared)
    more = lstm_inputs()
    calibrate(other, [more])
    merge_state(other, state)
    both.feed(prepared, more)
    resumed = calibration_state(prepared)
    assert all(torch.equal(value, resumed[key]) for key, value in calibration_state(other).items())
    load_calibration_state(prepared, state)
    assert prepared_state(prepared).sites.sites
    assert all(torch.equal(v, state[k]) for k, v in calibration_state(prepared).items())
