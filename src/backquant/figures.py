"""What is measured of a result: read by a report without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Figures:
    """What ``quantize`` measured of its result beside the float model; ``None``: not measured.

    ``sqnr``: of the outputs in dB (higher is better) on ``data``; ``outputs``: of each, and of its joined
    parts; ``seconds``: of a call with the example
    inputs; ``metric``: the user's.
    """

    sqnr: float | None = None
    data: str = ""
    seconds: float | None = None
    float_seconds: float | None = None
    metric: float | None = None
    float_metric: float | None = None
    outputs: dict[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> tuple[str, float] | None:
        """The output, or part of one, with the lowest SQNR.

        >>> Figures(outputs={"output 0": 40.0, "output 1": 3.0}).worst
        ('output 1', 3.0)
        """
        return min(self.outputs.items(), key=lambda one: one[1], default=None)
