"""Figures from timings: medians, spread, ratios to the float model, SQNR; as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np

__all__ = ["Row", "geometric_mean", "sqnr", "table"]


def sqnr(reference: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """Signal to quantization noise, dB."""
    wanted = reference.astype(np.float64)
    noise = float(np.square(wanted - other).sum())
    return 10 * math.log10(float(np.square(wanted).sum()) / noise) if noise else math.inf


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


@dataclass(frozen=True)
class Row:
    """One peer on one model. ``rounds``: per round, the smallest time of a run, ms.

    Peers take turns, a few runs each: a round. What else the machine does disturbs single runs, so
    the smallest time of a round counts, and ratios are medians of ratios within a round.
    """

    model: str
    peer: str
    rounds: tuple[float, ...] = ()
    sqnr: float | None = None
    failed: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def milliseconds(self) -> float:
        return median(self.rounds)

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, as a share of the median."""
        low, high = np.percentile(self.rounds, [25, 75])
        return float((high - low) / 2 / self.milliseconds)

    def ratio(self, base: Row) -> float:
        """How many times as fast as ``base``."""
        return median(b / own for own, b in zip(self.rounds, base.rounds, strict=True))

    def to_dict(self, base: Row | None) -> dict[str, Any]:
        data = asdict(self)
        if self.rounds:
            data |= {"ms": self.milliseconds, "spread": self.spread}
            if base is not None and base.rounds:
                data["ratio"] = self.ratio(base)
        return data


def table(rows: Sequence[Row], titles: dict[str, str]) -> str:
    """Markdown: a line per model, a column per peer, and the geometric means of the ratios."""
    found = {(row.model, row.peer): row for row in rows}
    models = list(dict.fromkeys(row.model for row in rows))
    others = [peer for peer in titles if peer != "fp32"]
    lines = [
        "| model | fp32 eager ms | " + " | ".join(f"{titles[p]} × (SQNR)" for p in others) + " |",
        "|---" * (len(others) + 2) + "|",
    ]
    ratios: dict[str, list[float]] = {peer: [] for peer in others}
    for model in models:
        base = found.get((model, "fp32"))
        cells = [_cell(found.get((model, peer)), base, ratios[peer]) for peer in others]
        cells = _best_is_bold(cells)
        first = f"{base.milliseconds:.1f} ± {base.spread:.0%}" if base and base.rounds else "–"
        lines.append(f"| {model} | {first} | " + " | ".join(cells) + " |")
    means = [
        f"{geometric_mean(ratios[p]):.2f}"
        + (f" (of {len(ratios[p])})" if len(ratios[p]) < len(models) else "")
        if ratios[p]
        else "–"
        for p in others
    ]
    lines.append("| geometric mean | | " + " | ".join(means) + " |")
    failures = [f"- {row.model}, {titles[row.peer]}: {row.failed}" for row in rows if row.failed]
    return "\n".join(lines + (["", *failures] if failures else []))


def _cell(row: Row | None, base: Row | None, ratios: list[float]) -> str:
    if row is None or base is None:
        return "–"
    if row.failed or not base.rounds:
        return "failed"
    ratio = row.ratio(base)
    ratios.append(ratio)
    quality = "" if row.sqnr is None or row.sqnr > 60 else f" ({row.sqnr:.1f})"
    return f"{ratio:.2f}{quality}"


def _best_is_bold(cells: list[str]) -> list[str]:
    numbers = [float(cell.split()[0]) if cell[0].isdigit() else 0.0 for cell in cells]
    best = max(numbers, default=0.0)
    return [
        cell.replace(cell.split()[0], f"**{cell.split()[0]}**", 1) if n == best and n else cell
        for cell, n in zip(cells, numbers, strict=True)
    ]
