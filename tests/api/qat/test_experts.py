"""Mixtures of experts of transformers as they are, in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import backquant
from backquant import PrepareCustomConfig
from backquant.errors import CaptureError

SIZES = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8},
    **{"intermediate_size": 48, "moe_intermediate_size": 16, "vocab_size": 100, "use_cache": False},
    **{"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    **{"num_key_value_heads": 2, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
}
MAPPING: Any = backquant.get_default_qat_qconfig_mapping("x86")


def _model(name: str) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**SIZES)
    model: torch.nn.Module = getattr(transformers, f"{name}Model")(config)
    return model.train()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss", "Olmoe", "GraniteMoe"])
def test_experts_are_rounded_in_training_and_run_on_integers(
    name: str, tmp_path: Any, three_steps: Callable[..., None]
) -> None:
    torch.manual_seed(0)
    model, inputs = _model(name), {"input_ids": torch.randint(3, 100, (2, 12))}
    prepared = backquant.prepare_qat_fx(model, MAPPING, inputs, backend_config="x86")
    before = {path: each.clone() for path, each in prepared.named_parameters()}
    three_steps(prepared, inputs, lr=1e-2)
    experts = [p for p, each in prepared.named_parameters() if "experts" in p and each.dim() == 3]
    assert len(experts) == 4
    changed = dict(prepared.named_parameters())
    assert not any(torch.equal(changed[path], before[path]) for path in experts)
    quantized = backquant.convert_fx(prepared.apply(backquant.disable_observer).eval())
    assert sum("grouped" in use.kernel for use in quantized.kernels) == 4
    with torch.no_grad():
        wanted = prepared(**inputs)["last_hidden_state"]
        made = quantized(**inputs)["last_hidden_state"]
    assert (made - wanted).square().sum() < 0.01 * wanted.square().sum()  # 20 dB
    backquant.save(quantized, tmp_path / "model.bq")
    loaded = backquant.load(tmp_path / "model.bq")
    assert torch.equal(loaded(**inputs)["last_hidden_state"], made)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["SwitchTransformers", "eager Mixtral"])
def test_loops_over_the_chosen_experts_are_refused_with_what_leaves_them_whole(
    name: str, three_steps: Callable[..., None]
) -> None:
    torch.manual_seed(0)
    if name == "SwitchTransformers":
        transformers = pytest.importorskip("transformers")
        sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 4, "num_decoder_layers": 4}
        config = transformers.SwitchTransformersConfig(
            **sizes, num_heads=4, num_experts=4, vocab_size=100, use_cache=False
        )
        model = transformers.SwitchTransformersModel(config).train()
        tokens = torch.randint(3, 100, (2, 12))
        inputs = {"input_ids": tokens, "decoder_input_ids": tokens}
    else:
        model, inputs = _model("Mixtral"), {"input_ids": torch.randint(3, 100, (2, 12))}
        model.set_experts_implementation("eager")
    with pytest.raises(CaptureError, match="control flow") as told:
        backquant.prepare_qat_fx(model, MAPPING, inputs, backend_config="x86")
    assert "for expert_idx in expert_hit" in told.value.where
    custom = eval(told.value.fix, {"PrepareCustomConfig": PrepareCustomConfig, "model": model})
    prepared = backquant.prepare_qat_fx(model, MAPPING, inputs, custom, backend_config="x86")
    three_steps(prepared, inputs, lr=1e-2)
    quantized = backquant.convert_fx(prepared.apply(backquant.disable_observer).eval())
    assert len(quantized.kernels) >= 16
    with torch.no_grad():
        wanted = prepared(**inputs)["last_hidden_state"]
        noise = (quantized(**inputs)["last_hidden_state"] - wanted).square().sum()
    assert noise < 0.1 * wanted.square().sum()  # a rounding chooses another expert here and there


@pytest.mark.filterwarnings("ignore")
def test_where_nothing_would_be_left_to_train_it_goes_part_by_part() -> None:
    """JetMoE sorts rows for its attention, too, by numbers that depend on values."""
    transformers = pytest.importorskip("transformers")
    config = transformers.JetMoeConfig(**{**SIZES, "kv_channels": 8})
    model = transformers.JetMoeModel(config).train()
    inputs = {"input_ids": torch.randint(3, 100, (2, 12))}
    with pytest.raises(CaptureError) as told:
        backquant.prepare_qat_fx(model, MAPPING, inputs, backend_config="x86")
    assert told.value.fix == "part by part; the largest is model.get_submodule('layers.0')"
