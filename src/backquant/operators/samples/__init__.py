"""Whether operators keep the samples of a batch apart, to the last bit."""

from __future__ import annotations

from backquant.operators.samples.rules import Held, Mixed
from backquant.operators.samples.table import check_numbers, dimension_of_samples, repeated

__all__ = ["Held", "Mixed", "check_numbers", "dimension_of_samples", "repeated"]
