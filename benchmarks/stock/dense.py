"""Segmentation and detection: torchvision, segmentation-models-pytorch, up to the boxes' scores."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.stock.entry import Entry
from benchmarks.stock.images import pictures

__all__ = ["entries"]


class Heads(nn.Module):
    """Backbone and heads of one of torchvision's detectors, up to the boxes' coordinates and scores.

    What follows in torchvision (anchors, sorting, non-maximum suppression) has no parameters.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = detector.backbone, detector.head

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        features = list(self.backbone(images).values())
        found: dict[str, torch.Tensor] = self.head(features)
        return found


class Proposals(nn.Module):
    """Backbone, feature pyramid and proposal head of torchvision's Faster R-CNN."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = detector.backbone, detector.rpn.head

    def forward(self, images: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        found: tuple[list[torch.Tensor], list[torch.Tensor]]
        found = self.head(list(self.backbone(images).values()))
        return found


def detector(builder: str, kind: type[nn.Module] = Heads, **options: Any) -> nn.Module:
    from torchvision.models import detection

    made = getattr(detection, builder)(weights=None, weights_backbone=None, **options)
    return kind(made)


def segmenter(builder: str) -> nn.Module:
    from torchvision.models import segmentation

    make = getattr(segmentation, builder)
    model: nn.Module = make(weights=None, weights_backbone=None, num_classes=5)
    return model


def smp(kind: str, encoder: str, **options: Any) -> nn.Module:
    import segmentation_models_pytorch

    make = getattr(segmentation_models_pytorch, kind)
    model: nn.Module = make(encoder, encoder_weights=None, classes=5, **options)
    return model


def _entry(name: str, family: str, make: Any, side: int = 64) -> Entry:
    return Entry(name, family, make, partial(pictures, side=side), ((3,), (1,)))


def entries() -> Iterator[Entry]:
    yield from _segmentation()
    yield from _detection()


def _segmentation() -> Iterator[Entry]:
    for builder in ("lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large", "fcn_resnet50"):
        yield _entry(f"torchvision.{builder}", "segmentation", partial(segmenter, builder))
    several = (
        *("Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet"),
        *("DeepLabV3", "DeepLabV3Plus", "UPerNet"),
    )
    for kind in several:
        yield _entry(f"smp.{kind}", "segmentation", partial(smp, kind, "resnet18"))
    yield _entry("smp.Segformer", "segmentation", partial(smp, "Segformer", "mit_b0"))
    make = partial(smp, "Unet", "timm-efficientnet-b0", decoder_attention_type="scse")
    yield _entry("smp.Unet efficientnet", "segmentation", make)
    make = partial(smp, "Unet", "resnet18", decoder_interpolation="bilinear")
    yield _entry("smp.Unet bilinear", "segmentation", make)


def _detection() -> Iterator[Entry]:
    sides = {"ssdlite320_mobilenet_v3_large": 96, "ssd300_vgg16": 300}
    sides |= {"retinanet_resnet50_fpn": 96, "fcos_resnet50_fpn": 96}
    for builder, side in sides.items():
        yield _entry(f"torchvision.{builder}", "detection", partial(detector, builder), side)
    make = partial(detector, "fasterrcnn_mobilenet_v3_large_fpn", Proposals)
    yield _entry("torchvision.fasterrcnn_mobilenet_v3_large_fpn", "detection", make, 96)
