"""transformers' language models, from small configurations, with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.stock.entry import Entry

__all__ = ["SMALL", "entries", "model", "tokens"]

# What most configurations call alike; ``transformers`` maps the names of the rest.
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
SEQ2SEQ = {
    "vocab_size": 100,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": 100,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}


def tokens(batch: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    """Token ids and a mask; the first sequence is half as long."""
    ids = torch.randint(3, 90, (batch, length))
    mask = torch.ones_like(ids)
    mask[0, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def ids(batch: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 90, (batch, length))}


def step(batch: int = 2, length: int = 6, heads: int = 4) -> dict[str, Any]:
    """One more token behind ``length`` that stand in a cache, as ``generate`` calls a decoder."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer in range(SMALL["num_hidden_layers"]):
        key, value = (torch.randn(batch, heads, length, 16) for _ in range(2))
        cache.update(key, value, layer)
    mask = torch.ones(batch, length + 1, dtype=torch.long)
    return ids(batch, 1) | {"attention_mask": mask, "past_key_values": cache}


def pairs(batch: int = 2, length: int = 12, target: int = 7) -> dict[str, torch.Tensor]:
    return tokens(batch, length) | {"decoder_input_ids": torch.randint(3, 90, (batch, target))}


def spectra(batch: int = 2, target: int = 5) -> dict[str, torch.Tensor]:
    decoder = torch.randint(3, 90, (batch, target))
    return {"input_features": torch.randn(batch, 16, 40), "decoder_input_ids": decoder}


def _build(name: str, options: dict[str, Any]) -> Any:
    import transformers

    kind = getattr(transformers, name)
    return kind(kind.config_class(**options)).eval()


def model(family: str, name: str, sample: Any, *others: Any, **options: Any) -> Entry:
    """An entry. ``others``: arguments of ``sample`` that give other sizes than its defaults."""
    return Entry(f"transformers.{name}", family, partial(_build, name, options), sample, others)


def _text(family: str, name: str, **options: Any) -> Entry:
    return model(family, name, tokens, (3, 19), (1, 5), **{**SMALL, **options})


def entries() -> Iterator[Entry]:
    yield from _encoders()
    yield from _decoders()
    yield from _pairs()


def _encoders() -> Iterator[Entry]:
    yield _text("encoder", "BertModel")
    yield _text("encoder", "BertForSequenceClassification")
    yield _text("encoder", "BertForMaskedLM")
    yield _text("encoder", "RobertaModel")
    yield _text("encoder", "XLMRobertaForTokenClassification")
    yield _text("encoder", "DistilBertModel")
    yield _text("encoder", "AlbertModel", embedding_size=32)
    yield _text("encoder", "ElectraModel", embedding_size=32)
    yield _text("encoder", "DebertaV2Model")
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
    yield model("encoder", "DebertaV2Model", tokens, (3, 19), **{**SMALL, **relative}).called(
        "transformers.DebertaV2 relative"
    )
    yield _text("encoder", "MPNetModel")
    yield _text("encoder", "ModernBertModel", global_attn_every_n_layers=2, local_attention=8)
    yield model("encoder", "T5EncoderModel", tokens, (3, 19), **T5)
    yield _text("encoder", "RoFormerModel", embedding_size=64)
    yield _text("encoder", "ConvBertModel", embedding_size=64)
    yield _text("encoder", "SqueezeBertModel", embedding_size=64)
    yield _text("encoder", "MobileBertModel", embedding_size=64, intra_bottleneck_size=64)
    yield _text("encoder", "FNetModel").sampled_by(ids)
    yield _text("encoder", "LayoutLMModel")


def _decoders() -> Iterator[Entry]:
    yield _text("decoder", "GPT2LMHeadModel")
    yield _text("decoder", "GPTNeoXForCausalLM")
    yield _text(
        "decoder", "GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]], num_layers=2
    )
    yield _text("decoder", "GPTJForCausalLM", rotary_dim=8)
    yield _text("decoder", "OPTForCausalLM", ffn_dim=128, word_embed_proj_dim=64)
    yield _text("decoder", "LlamaForCausalLM", num_key_value_heads=2)
    yield _text("decoder", "LlamaForCausalLM", num_key_value_heads=2, use_cache=False).called(
        "transformers.Llama no cache"
    )
    yield _text("decoder", "MistralForCausalLM", **GROUPED, sliding_window=8)
    yield _text("decoder", "MixtralForCausalLM", **GROUPED, num_local_experts=4)
    yield _text("decoder", "Qwen2ForCausalLM", **GROUPED)
    yield _text("decoder", "Qwen3ForCausalLM", **GROUPED)
    yield _text("decoder", "GemmaForCausalLM", **GROUPED)
    yield _text("decoder", "Gemma2ForCausalLM", **GROUPED)
    yield _text("decoder", "Gemma3ForCausalLM", **GROUPED)
    yield _text("decoder", "PhiForCausalLM")
    yield _text("decoder", "Phi3ForCausalLM", **GROUPED)
    yield _text("decoder", "StableLmForCausalLM", num_key_value_heads=2)
    yield _text("decoder", "CohereForCausalLM", num_key_value_heads=2)
    yield _text("decoder", "FalconForCausalLM")
    yield _text("decoder", "BloomForCausalLM")
    yield _text("decoder", "MptForCausalLM", max_seq_len=64)
    yield _text("decoder", "CodeGenForCausalLM", rotary_dim=8)
    yield _text("decoder", "MambaForCausalLM", state_size=8).sampled_by(ids)
    yield _text(
        "decoder", "Mamba2ForCausalLM", state_size=8, num_heads=8, head_dim=16, n_groups=2
    ).sampled_by(ids)
    yield _text("decoder", "RwkvForCausalLM", attention_hidden_size=64).sampled_by(ids)
    sizes = {"vocab_size": 100, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128}
    yield model("encoder", "XLNetModel", tokens, (3, 19), **sizes)
    for name, heads in (("LlamaForCausalLM", 2), ("Qwen3ForCausalLM", 2), ("GPT2LMHeadModel", 4)):
        options = {**SMALL, **(GROUPED if heads == 2 else {})}
        sample = partial(step, heads=heads)
        entry = model("decoder", name, sample, (3, 5), **options)
        yield entry.called(f"transformers.{name} one step")


def _pairs() -> Iterator[Entry]:
    yield model("encoder-decoder", "T5ForConditionalGeneration", pairs, (3, 9, 4), **T5)
    yield model("encoder-decoder", "BartForConditionalGeneration", pairs, (3, 9, 4), **SEQ2SEQ)
    yield model(
        "encoder-decoder", "MarianMTModel", pairs, (3, 9, 4), **SEQ2SEQ, forced_eos_token_id=0
    )
    yield model("encoder-decoder", "PegasusModel", pairs, (3, 9, 4), **SEQ2SEQ)
    whisper = {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 30}
    whisper |= {key: value for key, value in SEQ2SEQ.items() if key != "max_position_embeddings"}
    yield model("encoder-decoder", "WhisperForConditionalGeneration", spectra, (3, 7), **whisper)
