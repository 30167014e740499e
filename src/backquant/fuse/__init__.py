"""Fusion: several modules become one, as planned by ``match``."""

from __future__ import annotations

from backquant.fuse.admitted import FusedPlan, plan_fused
from backquant.fuse.apply import Fused, apply_fusion

__all__ = ["Fused", "FusedPlan", "apply_fusion", "plan_fused"]
