"""What a comparison found, as data: one row per operator, the outputs, a metric."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from backquant.accuracy.figures import Histogram, decibel_text, decibels
from backquant.files import write_text


@dataclass(frozen=True)
class OperatorError:
    """The error of one operator, or of the rounding of one value (``rounds``).

    ``added``: SQNR in dB of its result when what it reads is the float model's, as exactly as the integers
    that it reads can hold that. ``accumulated``: SQNR of its result in the quantized model as it runs.
    ``cosine`` and ``largest`` (absolute error) are of the accumulated error. ``clipped``: the share of the
    float model's values outside of the range that the integers hold; ``unused``: the share of that range
    that no value came near. Both are ``None`` for floats.
    """

    node: str
    operators: tuple[str, ...]
    name: str
    operator: str
    kernel: str
    rounds: bool
    added: float
    accumulated: float
    cosine: float
    largest: float
    clipped: float | None = None
    unused: float | None = None
    bounds: tuple[float, float] | None = None
    histogram: Histogram | None = None


@dataclass(frozen=True)
class OutputError:
    """One tensor of the result. ``parts``: what the node ``join`` joins in it, by their positions in that.

    >>> print(OutputError(0, 30.0, 0.999, 0.1, "cat", (OutputError(0, 9.0, 0.9, 0.1),)))
    SQNR 30.0 dB, higher is better (cosine 0.99900, largest error 0.1; parts of cat: 9.0 dB)
    """

    position: int
    sqnr: float
    cosine: float
    largest: float
    join: str = ""
    parts: tuple[OutputError, ...] = ()

    def __str__(self) -> str:
        levels = ", ".join(decibel_text(part.sqnr) for part in self.parts)
        parts = f"; parts of {self.join}: {levels}" if levels else ""
        return (
            f"SQNR {decibel_text(self.sqnr)}, higher is better (cosine {self.cosine:.5f}, "
            f"largest error {self.largest:.3g}{parts})"
        )


@dataclass(frozen=True)
class Comparison:
    """A quantized model beside the float model; print it, or ``to_dict``, or ``save_html``.

    ``metric``: what the user's metric says of the float and of the quantized model. ``inputs`` are for the
    drawing: what each operator of ``rows`` reads.

    >>> print(Comparison("x86", batches=2, outputs=(OutputError(0, 30.0, 0.999, 0.1),)))
    x86, 2 batches: output SQNR 30.0 dB, higher is better (cosine 0.99900, largest error 0.1)
    """

    backend: str
    model: str = ""
    batches: int = 0
    rows: tuple[OperatorError, ...] = ()
    outputs: tuple[OutputError, ...] = ()
    metric: tuple[float, float] | None = None
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def sqnr(self) -> float:
        """SQNR of the outputs in dB, from their mean relative error."""
        losses = [10 ** (-output.sqnr / 10) for output in self.outputs]
        return decibels(sum(losses) / len(losses)) if losses else float("inf")

    def worst(self, count: int = 10) -> tuple[OperatorError, ...]:
        """The operators with the largest error of their own, the worst first."""
        return tuple(sorted(self.rows, key=lambda row: row.added)[:count])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what is infinite (no error at all) is ``None``."""
        data: dict[str, Any] = finite({**asdict(self), "sqnr": self.sqnr})
        return data

    def __str__(self) -> str:
        from backquant.accuracy.text import renderable
        from backquant.report.text import render

        return render(renderable(self))

    def to_html(self) -> str:
        """One self-contained page that works offline."""
        from backquant.accuracy.html import comparison_page

        return comparison_page(self)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the page to ``path`` (under a temporary name first); ``UsageError`` where it cannot be."""
        write_text(path, self.to_html(), "save_html(path)")


def finite(value: Any) -> Any:
    """Plain data for JSON, which knows neither infinity nor NaN.

    >>> finite({"a": (1.0, float("inf"))})
    {'a': [1.0, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
