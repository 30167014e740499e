"""Models that others made: torchvision, timm, segmentation-models-pytorch, transformers, trained networks.

Importing this package makes ``import torchvision`` work beside the CPU build of torch, which lacks
torchvision's compiled operators: their schemas are defined first, without kernels. What calls one of
them (non-maximum suppression, region pooling) raises ``NotImplementedError``; everything else is stock.
Versions are pinned in ``requirements-stock.txt``.
"""

from __future__ import annotations

import contextlib

import torch

__all__ = ["define_torchvision_operators"]

_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": (
        "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor"
    ),
}


def define_torchvision_operators() -> None:
    """Define the schemas that torchvision's Python code looks up while it is imported; again is harmless."""
    for name, schema in _SCHEMAS.items():
        with contextlib.suppress(AttributeError):
            getattr(torch.ops.torchvision, name)
            continue
        torch.library.define(f"torchvision::{name}", schema)


define_torchvision_operators()
