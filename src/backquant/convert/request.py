"""What ``convert_fx`` may be asked for beyond what the prepared model says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from backquant.backend_config import BackendConfig, LeaveFloat
from backquant.match.plan import Reason
from backquant.observe.together import calculate_together
from backquant.qconfig import ConvertCustomConfig, QConfigMapping

#: Takes a tensor that conversion made and returns it, possibly in other memory (a mapped file).
Kept = Callable[[torch.Tensor], torch.Tensor]

#: The signature of ``calculate_together``.
Calculate = Callable[[Iterable[Any]], Mapping[int, tuple[torch.Tensor, torch.Tensor]]]


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """
    >>> as_it_is(torch.ones(1))
    tensor([1.])
    """
    return tensor


@dataclass(frozen=True)
class ConvertRequest:
    """``None``: as the model was prepared.

    ``qconfig_mapping``: that of prepare with some QConfigs replaced by ``None``. ``remove_qconfig``:
    drop the attributes ``qconfig`` of modules. ``leave_float``: rules for results beside those of the
    backend's ``qdq``; a note in the plan says how many results they leave in float. ``in_float``: matches
    of the plan, by position, that stay float after all, with the reasons. ``weight_qparams``: chosen ones, in
    PyTorch's dict, for the weights of modules, by path; the rest is measured. ``biases``: those that
    quantized modules get in place of their own, by path. ``kept``: takes each integer
    weight when it is made. ``calculate``: the qparams of histograms, by the ``id`` of the observer.

    >>> ConvertRequest().remove_qconfig
    True
    """

    custom: ConvertCustomConfig = field(default_factory=ConvertCustomConfig)
    qconfig_mapping: QConfigMapping | None = None
    backend_config: BackendConfig | None = None
    remove_qconfig: bool = True
    leave_float: tuple[LeaveFloat, ...] = ()
    in_float: Mapping[int, Reason] = field(default_factory=dict)
    weight_qparams: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    biases: Mapping[str, torch.Tensor] = field(default_factory=dict)
    kept: Kept = as_it_is
    calculate: Calculate = calculate_together
