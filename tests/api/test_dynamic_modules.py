"""``quantize_dynamic`` beside that of ``torch.ao``, on models that nothing captures."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import quantize_dynamic as theirs

import backquant
from backquant import UsageError, default_dynamic_qconfig
from backquant.api import quantize_dynamic
from backquant.lower.kernels.quantized import packing_for
from backquant.nn.quantized.scaled import Scaled
from backquant.qconfig import float16_dynamic_qconfig, per_channel_dynamic_qconfig


class Tagger(nn.Module):
    """It decides by values, and calls a linear layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.rnn = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        self.again = self.head[0]

    def forward(self, words: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
        features, state = self.rnn(self.table(words), state)
        if features.abs().max() > 1e6:
            features = features.clamp(-1, 1)
        return self.head(self.again(features)), state


@pytest.fixture
def tagger() -> Tagger:
    torch.manual_seed(0)
    return Tagger().eval()


@pytest.fixture
def words() -> torch.Tensor:
    return torch.arange(10).reshape(2, 5)


def by_torch(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    with packing_for("fbgemm"):
        return theirs(model, *args, **kwargs)


def kernels(model: nn.Module) -> set[str]:
    return {path for path, module in model.named_modules() if isinstance(module, Scaled)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16, torch.quint8])
def test_outputs_are_those_of_torch(tagger: Tagger, words: torch.Tensor, dtype: Any) -> None:
    ours, other = quantize_dynamic(tagger, dtype=dtype), by_torch(tagger, dtype=dtype)
    with torch.no_grad(), packing_for("fbgemm"):  # theirs take the process-wide engine
        output, (hidden, cell) = ours(words)
        expected, (their_hidden, their_cell) = other(words)
    assert torch.equal(output, expected)
    assert torch.equal(hidden, their_hidden)
    assert torch.equal(cell, their_cell)


def test_the_request_is_that_of_torch(tagger: Tagger) -> None:
    assert kernels(quantize_dynamic(tagger, {nn.Linear})) == {"head.0", "head.2"}
    assert kernels(quantize_dynamic(tagger, {"head", nn.LSTM})) == {"head.0", "head.2", "rnn"}
    per_layer = {
        nn.Linear: per_channel_dynamic_qconfig,
        "head.2": None,
        "rnn": float16_dynamic_qconfig,
    }
    quantized = quantize_dynamic(tagger, per_layer)
    assert kernels(quantized) == {"head.0", "rnn"}
    assert quantized.head[0].weight_scale.numel() == 8
    assert quantized.rnn.weight_dtype == torch.float16
    tagger.rnn.qconfig = default_dynamic_qconfig
    assert kernels(quantize_dynamic(tagger, set())) == {"rnn"}


def test_the_model_stays_as_it_is(tagger: Tagger, words: torch.Tensor) -> None:
    before = copy.deepcopy(tagger.state_dict())
    expected = tagger(words)[0]
    quantized = quantize_dynamic(tagger)
    assert quantized.again is quantized.head[0]
    assert kernels(tagger) == set()
    assert torch.equal(tagger(words)[0], expected)
    assert all(torch.equal(before[key], value) for key, value in tagger.state_dict().items())
    assert quantize_dynamic(tagger, inplace=True) is tagger
    assert kernels(tagger) == {"rnn", "head.0", "head.2"}


def test_a_state_dict_is_saved_and_loaded(tagger: Tagger, words: torch.Tensor) -> None:
    quantized = quantize_dynamic(tagger)
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    other = quantize_dynamic(Tagger().eval())
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(words)[0], quantized(words)[0])


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_a_transformer_whose_fast_path_reads_float_weights() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 3, 8)
    mask = torch.tensor([[False, False, True]] * 2)
    quantized = quantize_dynamic(model)
    assert {path.rpartition(".")[2] for path in kernels(quantized)} == {"linear1", "linear2"}
    with torch.no_grad():
        assert (quantized(x) - model(x)).abs().max() < 0.05
        masked = quantized(x, src_key_padding_mask=mask)
        expected = model(x, src_key_padding_mask=mask)
    assert (masked[:, :2] - expected[:, :2]).abs().max() < 0.05


def test_what_has_no_kernel_stays_float_and_is_listed() -> None:
    model = nn.Sequential(nn.Embedding(4, 4, max_norm=1.0))
    with pytest.warns(UserWarning, match="max_norm"):
        quantized = quantize_dynamic(model, dtype=torch.quint8)
    assert kernels(quantized) == set()


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("dynamic-misspelt", {"qconfig_spec": {"haed"}}),
        ("dynamic-dtype", {"dtype": torch.int32}),
        ("dynamic-mapping", {"mapping": {}}),
    ],
)
def test_bad_requests(
    tagger: Tagger, message: str, arguments: dict[str, Any], snapshot: Any
) -> None:
    with pytest.raises(UsageError) as caught:
        quantize_dynamic(tagger, **arguments)
    snapshot(message, caught.value)


def test_a_single_layer(words: torch.Tensor) -> None:
    linear = nn.Linear(5, 3)
    quantized = backquant.api.quantize_dynamic(linear)
    assert isinstance(quantized, Scaled)
    assert (quantized(words.float()) - linear(words.float())).abs().max() < 0.2


BY_HAND = {
    "leave it out": lambda _, n: quantize_dynamic(n["tagger"]),
}
