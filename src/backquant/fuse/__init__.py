"""Fusion: several modules become one, as planned by ``match``."""

from __future__ import annotations

from backquant.fuse.admitted import FusedPlan, plan_fused
from backquant.fuse.apply import apply_fusion
from backquant.fuse.attention import decompose_attention
from backquant.fuse.by_sample import LAYERS, input_axis, part_name, scaled_by_sample
from backquant.fuse.contracts import Fused
from backquant.fuse.recurrent_layers import (
    can_separate_layers,
    layers_of_recurrent,
    separate_recurrent_layers,
)
from backquant.fuse.sync_batch_norm import as_plain, put_back, without_sync

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
