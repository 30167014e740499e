"""Networks of torchvision and timm that classify images. Inputs are small, definitions are whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.stock.entry import Entry

__all__ = ["entries", "pictures"]

SIDE = 64


def pictures(batch: int = 2, side: int = SIDE) -> torch.Tensor:
    return torch.randn(batch, 3, side, side)


def torchvision_model(builder: str, **options: Any) -> nn.Module:
    from torchvision import models

    model: nn.Module = getattr(models, builder)(weights=None, **options)
    return model


def torchvision_class(module: str, name: str, *arguments: Any, **options: Any) -> nn.Module:
    """A network of torchvision's with a configuration of its own."""
    from importlib import import_module

    kind = getattr(import_module(f"torchvision.models.{module}"), name)
    model: nn.Module = kind(*arguments, **options)
    return model


def timm_model(builder: str, **options: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(builder, pretrained=False, **options)
    return model


def _torchvision(family: str, builder: str, side: int = SIDE, **options: Any) -> Entry:
    make = partial(torchvision_model, builder, **options)
    return Entry(f"torchvision.{builder}", family, make, partial(pictures, side=side), ((3,), (1,)))


def _timm(family: str, builder: str, side: int = SIDE, **options: Any) -> Entry:
    make = partial(timm_model, builder, **options)
    return Entry(f"timm.{builder}", family, make, partial(pictures, side=side), ((3,), (1,)))


def _of(name: str, family: str, make: Callable[[], nn.Module], side: int = SIDE) -> Entry:
    return Entry(name, family, make, partial(pictures, side=side), ((3,), (1,)))


def entries() -> Iterator[Entry]:
    yield from _cnn()
    yield from _mobile()
    yield from _attention()


def _cnn() -> Iterator[Entry]:
    kind = "CNN"
    yield _torchvision(kind, "resnet18")
    yield _torchvision(kind, "resnet50")
    yield _torchvision(kind, "resnext50_32x4d")
    yield _torchvision(kind, "vgg11_bn", num_classes=10)
    yield _torchvision(kind, "alexnet")
    yield _torchvision(kind, "squeezenet1_1")
    yield _torchvision(kind, "densenet121")
    yield _torchvision(kind, "googlenet", aux_logits=False, init_weights=False)
    yield _torchvision(kind, "inception_v3", 96, aux_logits=False, init_weights=False)
    yield _torchvision(kind, "regnet_y_400mf")
    yield _torchvision(kind, "convnext_tiny")
    yield _timm(kind, "resnetv2_50")
    yield _timm(kind, "nf_regnet_b0")
    yield _timm(kind, "convnextv2_atto")
    yield _timm(kind, "repvgg_a0")
    yield _timm(kind, "dla34")
    yield _timm(kind, "darknet53")
    yield _timm(kind, "resnest14d")


def _mobile() -> Iterator[Entry]:
    kind = "mobile CNN"
    yield _torchvision(kind, "mobilenet_v2")
    yield _torchvision(kind, "mobilenet_v3_small")
    yield _torchvision(kind, "mobilenet_v3_large")
    yield _torchvision(kind, "mnasnet0_5")
    yield _torchvision(kind, "shufflenet_v2_x0_5")
    yield _torchvision(kind, "shufflenet_v2_x1_0")
    yield _torchvision(kind, "efficientnet_b0")
    yield _torchvision(kind, "efficientnet_v2_s")
    yield _timm(kind, "mobilenetv4_conv_small")
    yield _timm(kind, "mobileone_s0")
    yield _timm(kind, "ghostnet_050")
    yield _timm(kind, "lcnet_050")
    yield _timm(kind, "fbnetc_100")
    yield _timm(kind, "tinynet_e")
    yield _timm(kind, "mixnet_s")
    yield _timm(kind, "hardcorenas_a")


def _attention() -> Iterator[Entry]:
    kind = "attention in vision"
    vit = {"image_size": 64, "patch_size": 16, "num_layers": 4, "num_heads": 4}
    vit |= {"hidden_dim": 128, "mlp_dim": 512}
    make = partial(torchvision_class, "vision_transformer", "VisionTransformer", **vit)
    yield _of("torchvision.VisionTransformer", kind, make)
    swin = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    make = partial(torchvision_class, "swin_transformer", "SwinTransformer", [4, 4], **swin)
    yield _of("torchvision.SwinTransformer", kind, make)
    yield _of("torchvision.swin_v2", kind, _swin_v2)
    maxvit = {"stem_channels": 32, "partition_size": 2, "head_dim": 16}
    maxvit |= {"block_channels": [32, 64], "block_layers": [1, 1], "stochastic_depth_prob": 0.0}
    make = partial(torchvision_class, "maxvit", "MaxVit", (64, 64), **maxvit)
    yield _of("torchvision.MaxVit", kind, make)
    yield _torchvision(kind, "vit_b_16", 224)
    yield _torchvision(kind, "swin_t")
    yield _timm(kind, "vit_tiny_patch16_224", img_size=64)
    yield _timm(kind, "deit3_small_patch16_224", img_size=64, depth=4)
    yield _timm(kind, "beit_base_patch16_224", img_size=64, depth=2)
    yield _timm(kind, "eva02_tiny_patch14_224", 56, img_size=56, depth=4)
    yield _timm(kind, "swinv2_cr_tiny_224", img_size=64, window_size=2, depths=(2, 2, 2, 2))
    yield _timm(kind, "maxvit_rmlp_pico_rw_256", img_size=64)
    yield _timm(kind, "coatnet_pico_rw_224", img_size=64)
    yield _timm(kind, "levit_128s", 224)
    yield _timm(kind, "mobilevit_xxs")
    yield _timm(kind, "mobilevitv2_050")
    yield _timm(kind, "edgenext_xx_small")
    yield _timm(kind, "efficientvit_b0")
    yield _timm(kind, "efficientformer_l1", 224)
    yield _timm(kind, "fastvit_t8")
    yield _timm(kind, "repvit_m0_9")
    yield _timm(kind, "pvt_v2_b0")
    yield _timm(kind, "poolformerv2_s12")
    yield _timm(kind, "mixer_s32_224", img_size=64)
    yield _timm(kind, "gmlp_ti16_224", img_size=64)
    yield _timm(kind, "cait_xxs24_224", img_size=64, depth=4)
    yield _timm(kind, "xcit_nano_12_p16_224", img_size=64, depth=4)
    yield _timm(kind, "crossvit_tiny_240", 240)
    yield _timm(kind, "nest_tiny", img_size=64)
    yield _timm(kind, "twins_svt_small", img_size=64, depths=(2, 2, 2, 2))


def _swin_v2() -> nn.Module:
    from torchvision.models.swin_transformer import (
        PatchMergingV2,
        SwinTransformer,
        SwinTransformerBlockV2,
    )

    model: nn.Module = SwinTransformer(
        patch_size=[4, 4],
        embed_dim=32,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        block=SwinTransformerBlockV2,
        downsample_layer=PatchMergingV2,
    )
    return model
