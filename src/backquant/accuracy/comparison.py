"""What a comparison found, as data: one row per operator, the outputs, a metric."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from backquant.accuracy.figures import SCALE, Histogram, batch_count, decibel_text, decibels, heat
from backquant.pages import (
    Box,
    Card,
    Cell,
    Column,
    Document,
    Drawing,
    Graph,
    Note,
    Row,
    Section,
    Shown,
    Table,
)
from backquant.pages.markup import Element, tag

_COLUMNS = [
    *(Column("operator"), Column("what")),
    *(
        Column(name, "number")
        for name in ("SQNR alone", "SQNR in all", "cosine", "largest", "clipped", "unused")
    ),
]
_MEANING = (
    "SQNR in dB, higher is better. Alone: the error that this operator introduces by itself; "
    "in all: with the error of all before it."
)
_BARS = (
    "Bars: the float model's values, counted on a logarithmic scale. Band: what the integers hold."
)
_FEW = 20  # rows that text shows
_CLIPPED = 0.001  # a share that the table shows
_WIDTH, _HEIGHT = 300, 90  # of a histogram


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

    @property
    def what(self) -> str:
        """What runs it, or what it is."""
        return self.kernel or self.operator

    @property
    def numbers(self) -> tuple[str, ...]:
        """What was measured of it, as text."""
        return (
            decibel_text(self.added),
            decibel_text(self.accumulated),
            f"{self.cosine:.5f}",
            f"{self.largest:.3g}",
            _percent(self.clipped),
            _percent(self.unused),
        )


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
class Comparison(Shown):
    """A quantized model beside the float model; print it, or ``to_dict``, or ``save_html``.

    ``metric``: what the user's metric says of the float and of the quantized model. ``inputs`` are for the
    drawing: what each operator of ``rows`` reads.

    >>> print(Comparison("x86", batches=2, outputs=(OutputError(0, 30.0, 0.999, 0.1),)))
    x86, 2 batches: output SQNR 30.0 dB, higher is better (cosine 0.99900, largest error 0.1)
      SQNR of the outputs  30.0 dB (higher is better), 2 batches
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

    def document(self) -> Document:
        """Outputs and metric, the operators that add most, histograms, and the graph by loss."""
        outputs = ", ".join(map(self._output, self.outputs)) or "no float output"
        model = f"{self.model} for " if self.model else ""
        ranking = self.worst(len(self.rows))
        rows = [_row(row) for row in ranking]
        more = "more have less error: .to_dict() and .save_html() have all"
        counted = [row for row in ranking if row.histogram is not None][:10]
        return Document(
            title=self.model or self.backend,
            about=f"on {self.backend}: quantized beside float",
            headline=f"{model}{self.backend}, {batch_count(self.batches)}: {outputs}",
            cards=list(self._cards(ranking)),
            parts=[
                Section(
                    "The worst first",
                    [Note(_MEANING), Table(_COLUMNS, rows, _FEW, more)] if rows else [],
                ),
                Section(
                    "The ten worst tensors",
                    [Note(_BARS), *map(_histogram, counted)] if counted else [],
                    in_text=False,
                ),
                Section("The graph", [self._graph(ranking)], in_text=False),
            ],
        )

    def _output(self, output: OutputError) -> str:
        return f"output{'' if len(self.outputs) == 1 else f' {output.position}'} {output}"

    def _cards(self, ranking: Sequence[OperatorError]) -> Iterator[Card]:
        level, count = decibel_text(self.sqnr), batch_count(self.batches)
        yield Card("SQNR of the outputs", level, f"(higher is better), {count}")
        if self.metric is not None:
            yield Card("metric", f"{self.metric[1]:.6g}", f"({self.metric[0]:.6g} in float)")
        for row in ranking[:1]:
            yield Card("worst, SQNR alone", decibel_text(row.added), f"{row.name}, {row.what}")
            clipped = sum((one.clipped or 0.0) >= _CLIPPED for one in ranking)
            yield Card("values clipped", f"{clipped}", f"of {len(ranking)} tensors: 0.1% or more")

    def _graph(self, ranking: Sequence[OperatorError]) -> Graph:
        heads = [column.name for column in _COLUMNS[2:]]
        boxes = {
            row.node: Box(
                *(row.node, row.name, row.what),
                heat=heat(row.added),
                details=[("what", row.what), *zip(heads, row.numbers, strict=True)],
            )
            for row in self.rows
        }
        first = ranking[0].node if ranking else None
        return Graph(list(boxes.values()), self.inputs, first, {"": f"colour: SQNR alone, {SCALE}"})


def _row(row: OperatorError) -> Row:
    name = Cell(row.name, node=row.node, heat=heat(row.added))
    return Row((name, row.what, *row.numbers), row.node)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def _histogram(row: OperatorError) -> Drawing:
    """Bars of the float values, over what the integers hold as a band."""
    counted = row.histogram
    assert counted is not None
    step = _WIDTH / max(len(counted.counts), 1)
    heights = [round(height * _HEIGHT, 1) for height in counted.bars()]
    size = {"width": round(step, 2)}
    bars = (
        tag("rect", class_="bar", x=round(at * step, 1), y=_HEIGHT - height, height=height, **size)
        for at, height in enumerate(heights)
        if height
    )
    words = "float"
    if row.bounds is not None:
        words = f"integers hold {row.bounds[0]:.4g} to {row.bounds[1]:.4g}"
    if row.clipped is not None:
        words += f"; clipped {_percent(row.clipped)}, unused {_percent(row.unused)}"
    plot = tag(
        "svg",
        *_band(counted, row.bounds),
        *bars,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"histogram of {row.name}",
    )
    title = f"{row.name}, {row.what}, SQNR alone {decibel_text(row.added)}"
    return Drawing(plot, title, f"values {counted.least:.4g} to {counted.most:.4g}; {words}")


def _band(counted: Histogram, bounds: tuple[float, float] | None) -> list[Element]:
    if bounds is None:
        return []
    span = (counted.high - counted.low) or 1.0
    low, high = (_WIDTH * (end - counted.low) / span for end in bounds)
    low, high = max(0.0, low), min(float(_WIDTH), high)
    width = round(max(high - low, 0.5), 1)
    return [tag("rect", class_="band", x=round(low, 1), y=0, width=width, height=_HEIGHT)]


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
