"""Calibration: running a prepared model on data so that its observers measure."""

from __future__ import annotations

from backquant.calibrate.checkpoint import calibration_state, load_calibration_state, merge_state
from backquant.calibrate.feed import (
    CalibrationReport,
    Progress,
    ProgressBar,
    UnseenObserver,
    calibrate,
    waiting_for_data,
)
from backquant.calibrate.group import synchronize_observers
from backquant.calibrate.observers import prepared_parts, saw_data, site_observers

__all__ = [
    "CalibrationReport",
    "Progress",
    "ProgressBar",
    "UnseenObserver",
    "calibrate",
    "calibration_state",
    "load_calibration_state",
    "merge_state",
    "prepared_parts",
    "saw_data",
    "site_observers",
    "synchronize_observers",
    "waiting_for_data",
]
