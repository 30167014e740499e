"""One rule of a description that a request breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from backquant.backend_config import DTypeWithConstraints
from backquant.match.plan import TensorRequest
from backquant.reason_codes import ReasonCode


@dataclass(frozen=True)
class Refusal:
    """One rule that is broken."""

    rule: ReasonCode
    asked: str
    admitted: str
    fix: str = ""


Rule: TypeAlias = Callable[[TensorRequest, DTypeWithConstraints], Refusal | None]
