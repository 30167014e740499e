"""Ratios as grouped bars."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import Row

__all__ = ["Bars", "draw", "draw_bars"]

# Ours have the same colour in all pictures.
_OURS = ("tab:blue", "navy", "skyblue", "slateblue")
_OTHERS = ("tab:orange", "khaki", "goldenrod", "lightgreen", "tab:green", "tab:pink", "silver")


@dataclass(frozen=True)
class Bars:
    """One group of bars per place, one bar per series (at most 4 of ours and 7 others); None where there
    is no figure."""

    places: Sequence[str]
    series: dict[str, Sequence[float | None]]
    label: str


def draw(rows: Sequence[Row], titles: dict[str, str], path: Path) -> None:
    """Write a picture (its kind by the suffix of ``path``) of times as fast as fp32 eager."""
    found = {(row.model, row.peer): row for row in rows if row.rounds}
    models = [m for m in dict.fromkeys(row.model for row in rows) if (m, "fp32") in found]
    peers = [p for p in titles if p != "fp32" and any((m, p) in found for m in models)]
    series = {
        titles[peer]: [
            found[m, peer].ratio(found[m, "fp32"]) if (m, peer) in found else None for m in models
        ]
        for peer in peers
    }
    draw_bars(Bars(models, series, "times as fast as fp32 eager"), path)


def draw_bars(bars: Bars, path: Path) -> None:
    """Write the picture; without matplotlib, say so on standard error."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    count, many = len(bars.places), max(1, len(bars.series))
    inches = max(6.0, count * max(1.1, 0.26 * many))
    figure, axes = plt.subplots(figsize=(inches, 4.2), layout="constrained")
    width = 0.85 / many
    ours, others = iter(_OURS), iter(_OTHERS)
    for index, (title, values) in enumerate(bars.series.items()):
        color = next(ours if title.startswith("backquant") else others)
        places = [i + (index - (many - 1) / 2) * width for i in range(count)]
        drawn = axes.bar(places, [v or 0.0 for v in values], width, label=title, color=color)
        texts = ["none" if value is None else f"{value:.1f}" for value in values]
        axes.bar_label(drawn, texts, fontsize=6, padding=1, rotation=90)
    axes.margins(x=0.02, y=0.12)
    axes.axhline(1, color="black", linewidth=0.6)
    axes.set_xticks(range(count), bars.places, rotation=20, ha="right")
    axes.set_ylabel(bars.label)
    figure.legend(loc="outside upper center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
