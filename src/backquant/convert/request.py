"""What ``convert_fx`` may be asked for beyond what the prepared model says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from backquant.backend_config import BackendConfig, LeaveFloat
from backquant.match.plan import Reason
from backquant.qconfig import ConvertCustomConfig, QConfigMapping

__all__ = ["ConvertRequest"]


@dataclass(frozen=True)
class ConvertRequest:
    """``None``: as the model was prepared.

    ``qconfig_mapping``: that of prepare with some QConfigs replaced by ``None``. ``remove_qconfig``:
    drop the attributes ``qconfig`` of modules. ``leave_float``: rules for results beside those of the
    backend's ``qdq``; a note in the plan says how many results they leave in float. ``in_float``: matches
    of the plan, by position, that stay float after all, with the reasons.

    >>> ConvertRequest().remove_qconfig
    True
    """

    custom: ConvertCustomConfig = field(default_factory=ConvertCustomConfig)
    qconfig_mapping: QConfigMapping | None = None
    backend_config: BackendConfig | None = None
    remove_qconfig: bool = True
    leave_float: tuple[LeaveFloat, ...] = ()
    in_float: Mapping[int, Reason] = field(default_factory=dict)
