"""Fusion: several modules become one, as planned by ``match``."""

from __future__ import annotations

from backquant.fuse.admitted import FusedPlan, plan_fused
from backquant.fuse.apply import Fused, apply_fusion, as_plain, put_back, without_sync
from backquant.fuse.taken_apart import (
    LAYERS,
    can_separate_layers,
    decompose_attention,
    input_axis,
    layers_of_recurrent,
    part_name,
    scaled_by_sample,
    separate_recurrent_layers,
)

__all__ = [
    "LAYERS",
    "Fused",
    "FusedPlan",
    "apply_fusion",
    "as_plain",
    "can_separate_layers",
    "decompose_attention",
    "separate_recurrent_layers",
    "input_axis",
    "layers_of_recurrent",
    "part_name",
    "plan_fused",
    "put_back",
    "scaled_by_sample",
    "without_sync",
]
