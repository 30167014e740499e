"""Models that others made: torchvision, timm, segmentation-models-pytorch, transformers, trained networks.

Importing this package makes ``import torchvision`` work beside a build of torch that torchvision's compiled
operators do not fit (the CPU build): their schemas are defined first, without kernels. What calls one of
them (non-maximum suppression, region pooling) raises ``NotImplementedError``; everything else is stock.
Versions are pinned in ``requirements-stock.txt``.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

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
    """Define the schemas that torchvision's Python code looks up while it is imported; again is harmless.

    Where torchvision has operators of its own that fit this torch, defining them twice would end the process.
    """
    found = importlib.util.find_spec("torchvision")
    if found is not None and has_operators(map(Path, found.submodule_search_locations or ())):
        return
    for name, schema in _SCHEMAS.items():
        with contextlib.suppress(AttributeError):
            getattr(torch.ops.torchvision, name)
            continue
        torch.library.define(f"torchvision::{name}", schema)


def has_operators(folders: Iterable[Path]) -> bool:
    """Whether torchvision's library of operators is in one of the folders and loads beside this torch."""
    for library in (file for folder in folders for file in folder.glob("_C*.so")):
        with contextlib.suppress(OSError):
            torch.ops.load_library(str(library))
            return True
    return False


define_torchvision_operators()
