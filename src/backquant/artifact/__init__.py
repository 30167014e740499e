"""Saving and loading quantized models: one file, no pickle; loads without the model's class."""

from __future__ import annotations

from backquant.artifact.store import Description, describe, load, save

__all__ = ["Description", "describe", "load", "save"]
