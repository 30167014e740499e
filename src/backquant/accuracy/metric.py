"""The user's own figure of a model."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from backquant.errors import BackquantError, UsageError, first_line

Metric = Callable[[nn.Module], float]


def measured_metric(metric: Metric, model: nn.Module, which: str) -> float:
    """What ``metric`` says of ``model``. Raises ``UsageError`` where it raises, or gives no finite number.

    >>> measured_metric(lambda model: model.p, nn.Dropout(0.25), "the float model")
    0.25
    """
    where = f"metric={getattr(metric, '__name__', metric)!s}, on {which}"
    fix = "metric(model) -> float, such as lambda model: accuracy(model, validation_loader)"
    try:
        with torch.no_grad():
            value = float(metric(model))
    except BackquantError:
        raise
    except Exception as error:
        what = f"the metric raised {type(error).__name__}: {first_line(error)}"
        raise UsageError(what, where=where, fix=fix) from error
    if not math.isfinite(value):
        raise UsageError(f"the metric is {value}", where=where, fix=fix)
    return value
