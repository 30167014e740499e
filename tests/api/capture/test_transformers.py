"""Small transformers through ``backquant.quantize``: captured by export, called as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import InputError

#: dB that these small models keep with 8 bits, with 3 dB of room
LEAST = {"bert": 50.0, "vit": 28.0, "swin": 29.0, "llama": 24.0, "gpt2": 28.0}


def _value(output: Any) -> torch.Tensor:
    return next(iter(output.values()))  # type: ignore[no-any-return]


def test_a_family(
    family: tuple[str, nn.Module, Callable[[], dict[str, torch.Tensor]]],
    sqnr: Callable[[torch.Tensor, torch.Tensor], float],
    tmp_path: Path,
) -> None:
    name, model, inputs = family
    example = inputs()
    quantized = backquant.quantize(model, example, calibration=[inputs() for _ in range(6)])
    assert quantized.report.notes[0].startswith("captured by torch.export; a symbolic trace fails")
    linear = [row for row in quantized.report.rows if row.operator in ("Linear", "F.linear")]
    assert linear and all(row.quantized and row.kernel for row in linear)
    with torch.no_grad():
        wanted, got = model(**example), quantized(**example)
    assert type(got) is type(wanted)
    assert list(got) == list(wanted)
    assert sqnr(_value(wanted), _value(got)) > LEAST[name]

    file = tmp_path / "model.bq"
    backquant.save(quantized, file)
    loaded = backquant.load(file)(**example)
    assert type(loaded) is type(wanted)
    assert list(loaded) == list(wanted)
    assert torch.equal(_value(loaded), _value(got)) and torch.equal(loaded[0], _value(got))


def test_other_batches_and_lengths(
    make_bert: Callable[..., nn.Module], make_tokens: Callable[..., dict[str, torch.Tensor]]
) -> None:
    model = make_bert()
    calibration = [make_tokens(2, 12), make_tokens(1, 7), make_tokens(3, 20)]
    quantized = backquant.quantize(model, calibration=calibration)
    for batch, length in ((1, 12), (5, 3), (2, 33)):
        example = make_tokens(batch, length)
        with torch.no_grad():
            wanted = model(**example).last_hidden_state
        assert quantized(**example).last_hidden_state.shape == wanted.shape


def test_arguments_that_were_not_exported(
    make_bert: Callable[..., nn.Module], make_tokens: Callable[..., dict[str, torch.Tensor]]
) -> None:
    example = make_tokens()
    quantized = backquant.quantize(make_bert(), example, calibration=[example])
    ids, mask = example["input_ids"], example["attention_mask"]
    assert quantized(ids, mask).last_hidden_state.shape == (2, 12, 64)
    with pytest.raises(InputError, match="input 'attention_mask' was a tensor"):
        quantized(ids)
    with pytest.raises(InputError, match="input 'token_type_ids' is int64"):
        quantized(ids, mask, token_type_ids=torch.zeros_like(ids))
    with pytest.raises(InputError, match="they are the same size in this model"):
        quantized(ids, mask[:, :5])


def test_eager_attention(
    make_bert: Callable[..., nn.Module],
    make_tokens: Callable[..., dict[str, torch.Tensor]],
    sqnr: Callable[[torch.Tensor, torch.Tensor], float],
) -> None:
    """Masked scores hold the lowest float: what adds the mask stays float; so do the products, of floats in
    PyTorch's kernel."""
    model = make_bert(attn_implementation="eager")
    calibration = [make_tokens() for _ in range(6)]
    quantized = backquant.quantize(model, calibration=calibration)
    products = [row for row in quantized.report.rows if row.operator == "torch.matmul"]
    assert len(products) == 4
    assert not any(row.quantized for row in products)
    assert any("torch.matmul" in note for note in quantized.plan.notes)
    with torch.no_grad():
        wanted = model(**calibration[0]).last_hidden_state
    assert sqnr(wanted, quantized(**calibration[0]).last_hidden_state) > 28


def test_layers_of_torch(sqnr: Callable[[torch.Tensor, torch.Tensor], float]) -> None:
    """A trace keeps ``nn.TransformerEncoderLayer`` whole; an export takes it apart."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    batches = [torch.randn(2, 9, 32) for _ in range(4)]
    quantized = backquant.quantize(model, calibration=batches, capture="export")
    products = [
        row for row in quantized.report.rows if row.multiply_adds and "Linear" in row.operator
    ]
    products += [row for row in quantized.report.rows if row.operator == "F.linear"]
    assert len(products) == 8 and all(row.quantized for row in products)
    other = torch.randn(3, 5, 32)
    with torch.no_grad():
        assert sqnr(model(other), quantized(other)) > 28
