"""transformers' models of images, speech and series, from small configurations, with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.stock.entry import Entry
from benchmarks.stock.language import SMALL, model, tokens

__all__ = ["entries"]

VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 8,
}


def pixels(batch: int = 2, size: int = 32) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size)}


def audio(batch: int = 2, length: int = 1600) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(batch, length)}


def captions(batch: int = 2, length: int = 10) -> dict[str, torch.Tensor]:
    return tokens(batch, length) | pixels(batch)


def questions(batch: int = 2) -> dict[str, torch.Tensor]:
    return captions(batch) | {"decoder_input_ids": torch.randint(3, 90, (batch, 5))}


def _image(family: str, name: str, **options: Any) -> Entry:
    return model(family, name, pixels, (3,), (1,), **options)


def entries() -> Iterator[Entry]:
    yield from _vision()
    yield from _several()
    yield from _audio()


def _vision() -> Iterator[Entry]:
    yield _image("attention in vision", "ViTModel", **VISION)
    yield _image("attention in vision", "ViTForImageClassification", **VISION)
    yield _image("attention in vision", "DeiTModel", **VISION)
    yield _image("attention in vision", "BeitModel", **VISION)
    yield _image("attention in vision", "Dinov2Model", **VISION)
    swin = {"image_size": 32, "patch_size": 2, "embed_dim": 32, "window_size": 4}
    yield _image("attention in vision", "SwinModel", **swin, depths=[2, 2], num_heads=[2, 4])
    yield _image("attention in vision", "Swinv2Model", **swin, depths=[2, 2], num_heads=[2, 4])
    yield _image("CNN", "ConvNextModel", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2)
    yield _image("CNN", "ConvNextV2Model", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2)
    resnet = {"hidden_sizes": [16, 32], "depths": [2, 2], "embedding_size": 16}
    yield _image("CNN", "ResNetForImageClassification", **resnet)
    yield _image("CNN", "RegNetModel", **resnet, groups_width=8)
    yield _image("mobile CNN", "MobileNetV1Model", depth_multiplier=0.25, image_size=32)
    yield _image("mobile CNN", "MobileNetV2Model", depth_multiplier=0.25, image_size=32)
    yield _image(
        "mobile CNN",
        "EfficientNetModel",
        image_size=32,
        width_coefficient=0.25,
        depth_coefficient=0.25,
        hidden_dim=320,
    )
    segformer = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_encoder_blocks": 2}
    segformer |= {"num_attention_heads": [1, 2], "sr_ratios": [2, 1], "mlp_ratios": [2, 2]}
    segformer |= {"patch_sizes": [7, 3], "strides": [4, 2], "decoder_hidden_size": 32}
    yield _image("segmentation", "SegformerForSemanticSegmentation", **segformer)
    yield _image(
        "attention in vision", "PoolFormerModel", hidden_sizes=[16, 32, 32, 32], depths=[1, 1, 1, 1]
    )
    yield _image(
        "attention in vision",
        "MobileViTModel",
        image_size=32,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64],
    )
    yield _image(
        "segmentation",
        "DPTForDepthEstimation",
        **{**VISION, "num_hidden_layers": 4},
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 16, 16, 16],
        fusion_hidden_size=16,
    )
    yield _image(
        "detection",
        "YolosForObjectDetection",
        **{**VISION, "image_size": [32, 32]},
        num_detection_tokens=5,
    )
    yield _image(
        "attention in vision",
        "PvtV2Model",
        hidden_sizes=[16, 32, 32, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 2],
    )
    yield _image(
        "attention in vision",
        "LevitModel",
        image_size=64,
        hidden_sizes=[32, 48, 64],
        num_attention_heads=[2, 3, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ).sampled_by(partial(pixels, size=64))


def _several() -> Iterator[Entry]:
    clip = {
        "text_config": {**SMALL, "projection_dim": 32},
        "vision_config": VISION,
        "projection_dim": 32,
    }
    yield model("text and images", "CLIPModel", captions, **clip)
    yield model("attention in vision", "CLIPVisionModel", pixels, (3,), **VISION)
    yield model("encoder", "CLIPTextModel", tokens, (3, 19), **SMALL)
    yield model("text and images", "SiglipModel", captions, text_config=SMALL, vision_config=VISION)
    conv = {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3]}
    conv |= {
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    }
    speech = {**SMALL, **conv, "hidden_size": 64}
    yield model("speech", "Wav2Vec2ForCTC", audio, (3,), (1, 2000), **speech)
    yield model("speech", "HubertModel", audio, (3,), (1, 2000), **speech)
    yield model(
        "audio",
        "ASTModel",
        lambda b=2: {"input_values": torch.randn(b, 64, 32)},
        (3,),
        **{k: v for k, v in VISION.items() if k != "image_size"},
        max_length=64,
        num_mel_bins=32,
    )
    yield model(
        "text and images",
        "BlipForQuestionAnswering",
        questions,
        text_config=SMALL,
        vision_config=VISION,
    )
    yield model(
        "time series",
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
    yield model(
        "time series",
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
    make = partial(_detr, detr)
    sample = partial(pixels, size=64)
    yield Entry("transformers.DetrForObjectDetection", "detection", make, sample, ((3,),))


def _audio() -> Iterator[Entry]:
    """Codecs and vocoders: one-dimensional convolutions, transposed ones, an LSTM."""
    encodec = {"num_filters": 8, "hidden_size": 32, "codebook_size": 64, "codebook_dim": 32}
    encodec |= {"upsampling_ratios": [4, 2], "num_residual_layers": 1, "num_lstm_layers": 1}
    yield model("audio", "EncodecModel", waves, (3,), **encodec)
    dac = {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "decoder_hidden_size": 32}
    dac |= {"upsampling_ratios": [4, 2], "n_codebooks": 2, "codebook_size": 64, "codebook_dim": 4}
    yield model("audio", "DacModel", waves, (3,), **dac, hidden_size=16)
    hifi = {"model_in_dim": 16, "upsample_initial_channel": 32, "upsample_rates": [4, 2]}
    hifi |= {"upsample_kernel_sizes": [8, 4], "resblock_kernel_sizes": [3, 5]}
    hifi |= {"resblock_dilation_sizes": [[1, 3], [1, 3]]}
    yield model("audio", "SpeechT5HifiGan", spectrogram, (3,), (2, 20), **hifi)
    mimi = {"num_filters": 8, "hidden_size": 32, "codebook_size": 64, "codebook_dim": 16}
    mimi |= {"upsampling_ratios": [4, 2], "num_hidden_layers": 1, "num_attention_heads": 2}
    mimi |= {
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vector_quantization_hidden_dimension": 16,
    }
    mimi |= {"num_quantizers": 2, "num_semantic_quantizers": 1, "head_dim": 16}
    mimi |= {"upsample_groups": 32}
    yield model("audio", "MimiModel", waves, (3,), **mimi)


def waves(batch: int = 2, length: int = 512) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(batch, 1, length)}


def spectrogram(batch: int = 2, length: int = 16) -> dict[str, torch.Tensor]:
    return {"spectrogram": torch.randn(batch, length, 16)}


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
