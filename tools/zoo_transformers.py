"""Architectures of ``transformers``, small and with random weights, for ``tools/zoo.py``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from zoo_entry import Entry

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
VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 8,
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


def pairs(batch: int = 2, length: int = 12, target: int = 7) -> dict[str, torch.Tensor]:
    return tokens(batch, length) | {"decoder_input_ids": torch.randint(3, 90, (batch, target))}


def pixels(batch: int = 2, size: int = 32) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size)}


def spectra(batch: int = 2, target: int = 5) -> dict[str, torch.Tensor]:
    decoder = torch.randint(3, 90, (batch, target))
    return {"input_features": torch.randn(batch, 16, 40), "decoder_input_ids": decoder}


def audio(batch: int = 2, length: int = 1600) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(batch, length)}


def captions(batch: int = 2, length: int = 10) -> dict[str, torch.Tensor]:
    return tokens(batch, length) | pixels(batch)


def _build(name: str, options: dict[str, Any]) -> Any:
    import transformers

    kind = getattr(transformers, name)
    return kind(kind.config_class(**options)).eval()


def _model(name: str, inputs: Any, *others: Any, **options: Any) -> Entry:
    """``others``: arguments for ``inputs`` that give other sizes than its defaults."""
    return Entry(name, partial(_build, name, options), inputs, tuple(others))


def _text(name: str, **options: Any) -> Entry:
    return _model(name, tokens, (3, 19), (1, 5), **{**SMALL, **options})


def _image(name: str, **options: Any) -> Entry:
    return _model(name, pixels, (3,), (1,), **options)


def entries() -> Iterator[Entry]:
    yield from _encoders()
    yield from _decoders()
    yield from _pairs()
    yield from _vision()
    yield from _several()


def _encoders() -> Iterator[Entry]:
    yield _text("BertModel")
    yield _text("BertForSequenceClassification")
    yield _text("BertForMaskedLM")
    yield _text("RobertaModel")
    yield _text("XLMRobertaForTokenClassification")
    yield _text("DistilBertModel")
    yield _text("AlbertModel", embedding_size=32)
    yield _text("ElectraModel", embedding_size=32)
    yield _text("DebertaV2Model")
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
    yield _model("DebertaV2Model", tokens, (3, 19), **{**SMALL, **relative}).called(
        "DebertaV2 relative"
    )
    yield _text("MPNetModel")
    yield _text("ModernBertModel", global_attn_every_n_layers=2, local_attention=8)
    yield _model("T5EncoderModel", tokens, (3, 19), **T5)
    yield _text("RoFormerModel", embedding_size=64)
    yield _text("ConvBertModel", embedding_size=64)
    yield _text("SqueezeBertModel", embedding_size=64)
    yield _text("MobileBertModel", embedding_size=64, intra_bottleneck_size=64)
    yield _text("FNetModel").with_inputs(ids)
    yield _text("LayoutLMModel")


def _decoders() -> Iterator[Entry]:
    yield _text("GPT2LMHeadModel")
    yield _text("GPTNeoXForCausalLM")
    yield _text("GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]], num_layers=2)
    yield _text("GPTJForCausalLM", rotary_dim=8)
    yield _text("OPTForCausalLM", ffn_dim=128, word_embed_proj_dim=64)
    yield _text("LlamaForCausalLM", num_key_value_heads=2)
    yield _text("LlamaForCausalLM", num_key_value_heads=2, use_cache=False).called("Llama no cache")
    yield _text("MistralForCausalLM", **GROUPED, sliding_window=8)
    yield _text("MixtralForCausalLM", **GROUPED, num_local_experts=4)
    yield _text("Qwen2ForCausalLM", **GROUPED)
    yield _text("Qwen3ForCausalLM", **GROUPED)
    yield _text("GemmaForCausalLM", **GROUPED)
    yield _text("Gemma2ForCausalLM", **GROUPED)
    yield _text("Gemma3ForCausalLM", **GROUPED)
    yield _text("PhiForCausalLM")
    yield _text("Phi3ForCausalLM", **GROUPED)
    yield _text("StableLmForCausalLM", num_key_value_heads=2)
    yield _text("CohereForCausalLM", num_key_value_heads=2)
    yield _text("FalconForCausalLM")
    yield _text("BloomForCausalLM")
    yield _text("MptForCausalLM", max_seq_len=64)
    yield _text("CodeGenForCausalLM", rotary_dim=8)
    yield _text("MambaForCausalLM", state_size=8).with_inputs(ids)
    yield _text(
        "Mamba2ForCausalLM", state_size=8, num_heads=8, head_dim=16, n_groups=2
    ).with_inputs(ids)
    yield _text("RwkvForCausalLM", attention_hidden_size=64).with_inputs(ids)
    yield _text("XLNetModel", n_layer=2, d_inner=128)


def _pairs() -> Iterator[Entry]:
    yield _model("T5ForConditionalGeneration", pairs, (3, 9, 4), **T5)
    yield _model("BartForConditionalGeneration", pairs, (3, 9, 4), **SEQ2SEQ)
    yield _model("MarianMTModel", pairs, (3, 9, 4), **SEQ2SEQ, forced_eos_token_id=0)
    yield _model("PegasusModel", pairs, (3, 9, 4), **SEQ2SEQ)
    whisper = {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 30}
    whisper |= {key: value for key, value in SEQ2SEQ.items() if key != "max_position_embeddings"}
    yield _model("WhisperForConditionalGeneration", spectra, (3, 7), **whisper)


def _vision() -> Iterator[Entry]:
    yield _image("ViTModel", **VISION)
    yield _image("ViTForImageClassification", **VISION)
    yield _image("DeiTModel", **VISION)
    yield _image("BeitModel", **VISION)
    yield _image("Dinov2Model", **VISION)
    swin = {"image_size": 32, "patch_size": 2, "embed_dim": 32, "window_size": 4}
    yield _image("SwinModel", **swin, depths=[2, 2], num_heads=[2, 4])
    yield _image("Swinv2Model", **swin, depths=[2, 2], num_heads=[2, 4])
    yield _image("ConvNextModel", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2)
    yield _image("ConvNextV2Model", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2)
    resnet = {"hidden_sizes": [16, 32], "depths": [2, 2], "embedding_size": 16}
    yield _image("ResNetForImageClassification", **resnet)
    yield _image("RegNetModel", **resnet, groups_width=8)
    yield _image("MobileNetV1Model", depth_multiplier=0.25, image_size=32)
    yield _image("MobileNetV2Model", depth_multiplier=0.25, image_size=32)
    yield _image(
        "EfficientNetModel",
        image_size=32,
        width_coefficient=0.25,
        depth_coefficient=0.25,
        hidden_dim=320,
    )
    segformer = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_encoder_blocks": 2}
    segformer |= {"num_attention_heads": [1, 2], "sr_ratios": [2, 1], "mlp_ratios": [2, 2]}
    segformer |= {"patch_sizes": [7, 3], "strides": [4, 2], "decoder_hidden_size": 32}
    yield _image("SegformerForSemanticSegmentation", **segformer)
    yield _image("PoolFormerModel", hidden_sizes=[16, 32, 32, 32], depths=[1, 1, 1, 1])
    yield _image(
        "MobileViTModel",
        image_size=32,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64],
    )
    yield _image(
        "DPTForDepthEstimation",
        **VISION,
        backbone_out_indices=[0, 0, 1, 1],
        neck_hidden_sizes=[8, 16, 16, 16],
        fusion_hidden_size=16,
    )
    yield _image(
        "YolosForObjectDetection", **{**VISION, "image_size": [32, 32]}, num_detection_tokens=5
    )
    yield _image(
        "PvtV2Model",
        hidden_sizes=[16, 32, 32, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 2],
    )
    yield _image(
        "LevitModel",
        image_size=64,
        hidden_sizes=[32, 48, 64],
        num_attention_heads=[2, 3, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ).with_inputs(partial(pixels, size=64))


def _several() -> Iterator[Entry]:
    clip = {
        "text_config": {**SMALL, "projection_dim": 32},
        "vision_config": VISION,
        "projection_dim": 32,
    }
    yield _model("CLIPModel", captions, **clip)
    yield _model("CLIPVisionModel", pixels, (3,), **VISION)
    yield _model("CLIPTextModel", tokens, (3, 19), **SMALL)
    yield _model("SiglipModel", captions, text_config=SMALL, vision_config=VISION)
    conv = {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3]}
    conv |= {
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    }
    speech = {**SMALL, **conv, "hidden_size": 64}
    yield _model("Wav2Vec2ForCTC", audio, (3,), (1, 2000), **speech)
    yield _model("HubertModel", audio, (3,), (1, 2000), **speech)
    yield _model(
        "ASTModel",
        lambda b=2: {"input_values": torch.randn(b, 64, 32)},
        (3,),
        **{k: v for k, v in VISION.items() if k != "image_size"},
        max_length=64,
        num_mel_bins=32,
    )
    yield _model(
        "BlipForQuestionAnswering", captions, text_config=SMALL, vision_config=VISION
    ).called("Blip")
    yield _model(
        "TimeSeriesTransformerModel",
        series,
        prediction_length=4,
        context_length=12,
        lags_sequence=[1, 2],
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_time_features=1,
    )
    yield _model(
        "PatchTSTForPrediction",
        lambda b=2: {"past_values": torch.randn(b, 32, 2)},
        (3,),
        num_input_channels=2,
        context_length=32,
        prediction_length=8,
        d_model=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        patch_length=8,
        patch_stride=8,
        ffn_dim=64,
    )
    detr = {
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "num_queries": 5,
        "d_model": 32,
    }
    detr |= {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    detr |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    yield Entry("DetrForObjectDetection", partial(_detr, detr), partial(pixels, size=64), ((3,),))


def series(batch: int = 2) -> dict[str, torch.Tensor]:
    return {
        "past_values": torch.randn(batch, 14),
        "past_time_features": torch.randn(batch, 14, 1),
        "past_observed_mask": torch.ones(batch, 14),
        "future_values": torch.randn(batch, 4),
        "future_time_features": torch.randn(batch, 4, 1),
    }


def _detr(options: dict[str, Any]) -> Any:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        hidden_sizes=[16, 32], depths=[1, 1], embedding_size=16, out_features=["stage2"]
    )
    return DetrForObjectDetection(
        DetrConfig(backbone_config=backbone, backbone=None, **options)
    ).eval()
