"""Whether operators keep the samples of a batch apart."""

from __future__ import annotations

from backquant.operators.samples.rules import Held, Mixed
from backquant.operators.samples.table import dimension_of_samples, draws_numbers, repeated

__all__ = ["Held", "Mixed", "dimension_of_samples", "draws_numbers", "repeated"]
