"""The user's own figure of a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from backquant.errors import BackquantError, UsageError, first_line
from backquant.graph.user_code import user_line

Metric = Callable[[nn.Module], float]

_FIX = "metric=lambda model: accuracy(model, loader)   # a number that is finite"
_WORST = "a metric that is finite for any model: the worst value where nothing can be measured"


def measured_metric(metric: Metric, model: nn.Module, which: str) -> float:
    """What ``metric`` says of ``model``. Raises ``UsageError`` where it raises, or gives no finite number.

    >>> measured_metric(lambda model: model.p, nn.Dropout(0.25), "the float model")
    0.25
    """
    where = f"metric={getattr(metric, '__name__', metric)!s}, on {which}"
    try:
        with torch.no_grad():
            given = metric(model)
    except BackquantError:
        raise
    except Exception as error:
        what = f"the metric raised {type(error).__name__}: {first_line(error)}"
        line = user_line(error)
        place = f"{where}, {line}" if line else where
        raise UsageError(what, where=place, fix=_FIX) from error
    value = _number(given)
    if value is None:
        what = f"the metric gave {_shown(given)}, which is no number"
        raise UsageError(what, where=where, fix=_FIX)
    if not math.isfinite(value):
        raise UsageError(f"the metric is {value}", where=where, fix=_WORST)
    return value


def _number(given: Any) -> float | None:
    """A number, or a tensor or array that holds one; ``None`` for anything else.

    >>> _number(torch.tensor([2])), _number("2"), _number(None)
    (2.0, None, None)
    """
    if isinstance(given, str | bytes):
        return None
    try:
        return float(given)
    except (TypeError, ValueError, RuntimeError):
        return None


def _shown(given: Any) -> str:
    if given is None:
        return "None (a function without return?)"
    if isinstance(given, torch.Tensor):
        return f"a tensor of {given.numel()} values"
    return f"a {type(given).__name__}"
