"""Whether an engine does what a description says of it: cases generated from the description."""

from backquant.conformance.results import Conformance
from backquant.conformance.results import Outcome as ConformanceOutcome
from backquant.conformance.results import Verdict as ConformanceVerdict
from backquant.conformance.run import conform

__all__ = ["Conformance", "ConformanceOutcome", "ConformanceVerdict", "conform"]
