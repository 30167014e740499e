"""Models that take and return objects: caches of keys and values, as decoders do by default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import backquant

Sqnr = Callable[[torch.Tensor, torch.Tensor], float]


def _decoder(sliding_window: int | None) -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=100,
        sliding_window=sliding_window,
    )
    return MistralForCausalLM(config).eval()


def _step(decoder: nn.Module, batch: int = 2, past: int = 7) -> dict[str, Any]:
    """The next token after some that are in a cache."""
    ids = torch.randint(1, 90, (batch, past + 1))
    with torch.no_grad():
        cache = decoder(ids[:, :past]).past_key_values
    return {"input_ids": ids[:, past:], "past_key_values": cache}


def test_a_cache_comes_out(
    make_tokens: Callable[..., dict[str, torch.Tensor]], sqnr: Sqnr, tmp_path: Path
) -> None:
    decoder = _decoder(sliding_window=32)
    example = make_tokens()
    quantized = backquant.quantize(decoder, example, calibration=[make_tokens() for _ in range(4)])
    other = make_tokens(3, 9)
    with torch.no_grad():
        wanted, got = decoder(**other), quantized(**other)
    cache = got.past_key_values
    assert type(cache) is type(wanted.past_key_values)
    assert cache.get_seq_length() == 9 and cache.layers[0].sliding_window == 32
    assert cache.layers is not quantized(**other).past_key_values.layers
    for one, two in zip(wanted.past_key_values.layers, cache.layers, strict=True):
        assert sqnr(one.keys, two.keys) > 25 and sqnr(one.values, two.values) > 25
    with torch.no_grad():  # the float model goes on from it
        assert (
            decoder(torch.ones(3, 1, dtype=torch.long), past_key_values=cache).logits.shape[0] == 3
        )

    backquant.save(quantized, tmp_path / "model.bq")
    loaded = backquant.load(tmp_path / "model.bq")(**make_tokens(1, 5)).past_key_values
    assert loaded.layers[1].keys.shape == (1, 2, 5, 16)
    assert loaded.layers[1].cumulative_length == 5


def test_a_cache_goes_in(sqnr: Sqnr) -> None:
    decoder = _decoder(sliding_window=None)
    example = _step(decoder)
    quantized = backquant.quantize(decoder, example, calibration=[_step(decoder) for _ in range(4)])
    assert example["past_key_values"].get_seq_length() == 7
    step = _step(decoder, batch=3, past=10)
    got = quantized(**step)
    assert step["past_key_values"].get_seq_length() == 10
    assert got.past_key_values.get_seq_length() == 11
    with torch.no_grad():
        assert sqnr(decoder(**step).logits, got.logits) > 18
