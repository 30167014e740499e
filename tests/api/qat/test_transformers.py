"""Models of transformers as they are, whose ``forward`` is decorated, in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import backquant
from backquant.errors import CaptureError

SMALL = {
    **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 128, "vocab_size": 100},
}


def model_of(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    transformers = pytest.importorskip("transformers")
    if name == "ViT":
        config = transformers.ViTConfig(**SMALL, image_size=32, patch_size=8)
        return transformers.ViTModel(config), torch.randn(2, 3, 32, 32)
    config = getattr(transformers, f"{name}Config")(**SMALL, use_cache=False)
    return getattr(transformers, f"{name}Model")(config), torch.randint(3, 100, (2, 16))


@pytest.mark.filterwarnings("ignore")  # what stays float, and how it was traced
@pytest.mark.parametrize("name", ["Bert", "Roberta", "ViT", "Llama"])
def test_they_train_and_convert(name: str) -> None:
    torch.manual_seed(0)
    model, x = model_of(name)
    mapping: Any = backquant.get_default_qat_qconfig_mapping("x86")
    prepared = backquant.prepare_qat_fx(model.train(), mapping, (x,), backend_config="x86")
    prepared(x)["last_hidden_state"].square().mean().backward()
    trained = [each.grad for each in prepared.parameters() if each.grad is not None]
    assert len(trained) >= 20
    prepared.apply(backquant.disable_fake_quant).eval()
    with torch.no_grad():
        expected = model.eval()(x)["last_hidden_state"]
        torch.testing.assert_close(prepared(x)["last_hidden_state"], expected)
    prepared.apply(backquant.enable_fake_quant)
    assert len(backquant.convert_fx(prepared).kernels) > 10


NORMED = {
    "Gemma3Text": {"num_key_value_heads": 2, "head_dim": 16},
    "Llama": {},
    "Mistral": {"num_key_value_heads": 2},
    "Phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "Mamba": {"state_size": 8, "num_attention_heads": None, "intermediate_size": None},
    "T5": None,
}


def normed(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(3, 100, (2, 12))
    if name == "T5":
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
        config = transformers.T5Config(**sizes, vocab_size=100, use_cache=False)
        return transformers.T5Model(config), {"input_ids": tokens, "decoder_input_ids": tokens}
    options = {**SMALL, **NORMED[name], "use_cache": False}
    options = {key: value for key, value in options.items() if value is not None}
    config = getattr(transformers, f"{name}Config")(**options)
    return getattr(transformers, f"{name}Model")(config), {"input_ids": tokens}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NORMED)
def test_models_whose_norms_are_written_out_train(
    name: str, three_steps: Callable[..., None]
) -> None:
    """PyTorch, and we before, gave NaN: the variance rounded to 0, and its root divides."""
    torch.manual_seed(0)
    model, inputs = normed(name)
    mapping: Any = backquant.get_default_qat_qconfig_mapping("x86")
    prepared = backquant.prepare_qat_fx(model.train(), mapping, inputs, backend_config="x86")
    three_steps(prepared, inputs, lr=1e-3)
    quantized = backquant.convert_fx(prepared.apply(backquant.disable_observer).eval())
    with torch.no_grad():
        wanted = prepared(**inputs)["last_hidden_state"]
        noise = (quantized(**inputs)["last_hidden_state"] - wanted).square().sum()
    assert noise < 0.01 * wanted.square().sum()  # 20 dB
    places = [row.reasons[-1].place for row in quantized.report.rows if row.reasons]
    assert any(place.startswith("x86, defaults.leave_float[") for place in places)
    assert len(quantized.kernels) >= 16


@pytest.mark.filterwarnings("ignore")
def test_speech_models_that_mask_by_numpy_in_training() -> None:
    """SpecAugment cannot be recorded: the graph is that of evaluation, and the report says so."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    convolutions = {"conv_dim": (16, 16), "conv_kernel": (3, 3), "conv_stride": (2, 2)}
    config = transformers.Wav2Vec2Config(
        **{**SMALL, **convolutions, "num_feat_extract_layers": 2, "initializer_range": 0.2},
        **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0},
    )
    model, x = transformers.Wav2Vec2Model(config).train(), torch.randn(2, 2000)
    mapping: Any = backquant.get_default_qat_qconfig_mapping("x86")
    with pytest.warns(UserWarning, match="what the model does in evaluation mode"):
        prepared = backquant.prepare_qat_fx(model, mapping, (x,), backend_config="x86")
    for _ in range(3):
        prepared(x)["last_hidden_state"].square().mean().backward()
    quantized = backquant.convert_fx(prepared.apply(backquant.disable_observer).eval())
    with torch.no_grad():
        wanted = prepared(x)["last_hidden_state"]
        noise = (quantized(x)["last_hidden_state"] - wanted).square().sum()
    assert noise < 0.02 * wanted.square().sum()
    assert len(quantized.kernels) >= 16


def test_a_cache_in_the_result_is_told(snapshot: Any) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaModel(transformers.LlamaConfig(**SMALL)).train()
    mapping: Any = backquant.get_default_qat_qconfig_mapping("x86")
    with pytest.raises(CaptureError) as told:
        backquant.prepare_qat_fx(model, mapping, (torch.randint(3, 100, (2, 16)),))
    snapshot("a_cache_in_the_result", told.value)
