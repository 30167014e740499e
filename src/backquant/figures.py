"""What is measured of a result: read by a report without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    """What ``quantize`` measured of its result beside the float model; ``None``: not measured.

    ``sqnr``: of the outputs in dB (higher is better) on ``data``; ``seconds``: of a call with the example
    inputs; ``metric``: the user's.
    """

    sqnr: float | None = None
    data: str = ""
    seconds: float | None = None
    float_seconds: float | None = None
    metric: float | None = None
    float_metric: float | None = None
