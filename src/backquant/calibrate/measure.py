"""Calibration in the one call: needed only where something is quantized statically."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import fx

from backquant.calibrate import CalibrationReport, ProgressBar, calibrate, waiting_for_data
from backquant.errors import CalibrationError
from backquant.prepare import prepared_state, with_state

__all__ = ["measure"]

_SHOWN = 8


def measure(
    prepared: fx.GraphModule, batches: Iterable[Any] | None, *, progress: bool = False
) -> CalibrationReport:
    """Feed ``batches`` to the observers. None will do where no observer waits for data.

    The record of ``prepared`` notes which observers saw none.

    Raises ``CalibrationError`` when there are none and values have to be measured; names them.

    >>> import torch
    >>> from backquant.api.flow import prepare_fx
    >>> from backquant.qconfig import QConfigMapping, default_dynamic_qconfig
    >>> mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval()
    >>> measure(prepare_fx(model, mapping, torch.zeros(1, 4)), None)
    CalibrationReport(batches=0, unseen=())
    """
    if batches is None:
        _refuse_unmeasured(prepared)
        return CalibrationReport(0)
    with ProgressBar("calibrating") if progress else nullcontext() as bar:
        found = calibrate(prepared, batches, progress=bar)
    unseen = tuple(str(item.value) for item in found.unseen)
    with_state(prepared, replace(prepared_state(prepared), unseen=unseen))
    return found


def _refuse_unmeasured(prepared: fx.GraphModule) -> None:
    values = list(dict.fromkeys(item.value for item in waiting_for_data(prepared)))
    if not values:
        return
    shown = ", ".join(values[:_SHOWN])
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    raise CalibrationError(
        "values that are quantized statically have to be measured, and there is no calibration set",
        where=f"{shown}{more}",
        fix="calibration=[batch, ...], or quantize at each call, which needs no data:\n"
        "qconfig_mapping=QConfigMapping().set_global(default_dynamic_qconfig)",
    )
