"""Arm Ethos-U: a ``.tflite`` file, and beside it what Arm's compiler Vela makes of it, where that is
installed."""

from __future__ import annotations

from backquant.deploy.ethos_u.target import TARGET

__all__ = ["TARGET"]
