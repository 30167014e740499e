"""The ratios as grouped bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import Row

__all__ = ["draw"]


def draw(rows: Sequence[Row], titles: dict[str, str], path: Path) -> None:
    """Write a picture (its kind by the suffix of ``path``) of times as fast as fp32 eager."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found = {(row.model, row.peer): row for row in rows if row.rounds}
    models = [m for m in dict.fromkeys(row.model for row in rows) if (m, "fp32") in found]
    peers = [p for p in titles if p != "fp32" and any((m, p) in found for m in models)]
    figure, axes = plt.subplots(figsize=(max(6.0, 1.3 * len(models)), 4.2), layout="constrained")
    width = 0.85 / max(1, len(peers))
    for index, peer in enumerate(peers):
        heights = [
            found[m, peer].ratio(found[m, "fp32"]) if (m, peer) in found else 0.0 for m in models
        ]
        places = [i + (index - (len(peers) - 1) / 2) * width for i in range(len(models))]
        axes.bar(places, heights, width, label=titles[peer])
    axes.axhline(1, color="black", linewidth=0.6)
    axes.set_xticks(range(len(models)), models, rotation=20, ha="right")
    axes.set_ylabel("times as fast as fp32 eager")
    axes.legend(ncols=3, fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
