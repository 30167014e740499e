"""Cells as Markdown, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.deploy.cases import CASES
from benchmarks.deploy.cell import Cell, Form
from benchmarks.deploy.targets import TARGETS
from benchmarks.plot import Bars, draw_bars
from benchmarks.results import geometric_mean

__all__ = ["draw", "table"]


def table(cells: Sequence[Cell]) -> str:
    """A line per model and target, what failed and why, and what stays outside of integer kernels."""
    cells = _sorted(cells)
    lines = [
        "| model | target | quality (own) | integer share | × its float | × its own quantizer | ms |",
        "|---" * 7 + "|",
        *map(_line, cells),
        *_means(cells),
    ]
    for title, notes in (("No figure", _failures(cells)), ("In float", _floats(cells))):
        listed = list(notes)
        lines += ["", f"{title}:", "", *listed] if listed else []
    return "\n".join(lines) + "\n"


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Times as fast as the runtime's own quantizer, and (in a second file) as its floats."""
    cells = _sorted(cells)
    models = list(dict.fromkeys(cell.model for cell in cells))
    targets = list(dict.fromkeys(cell.target for cell in cells))
    for other, of in (("own", "the target's own quantizer"), ("float", "the target's float model")):
        found = {(c.model, c.target): c.against(other) for c in cells}
        series = {
            TARGETS[t].title: [r.value if (r := found.get((m, t))) else None for m in models]
            for t in targets
        }
        place = path if other == "own" else path.with_stem(f"{path.stem}_float")
        draw_bars(Bars(models, series, f"times as fast as {of}"), place)


def _sorted(cells: Sequence[Cell]) -> list[Cell]:
    models, targets = list(CASES), list(TARGETS)
    return sorted(cells, key=lambda c: (models.index(c.model), targets.index(c.target)))


def _line(cell: Cell) -> str:
    ours, own = cell.ours, cell.forms.get("own", Form())
    share = cell.facts.get("integer_share")
    parts = [
        cell.model,
        TARGETS[cell.target].title,
        f"{_quality(ours)} ({_quality(own)})",
        f"{share:.1%}" if share is not None else "–",
        str(cell.against("float") or "–"),
        str(cell.against("own") or "–"),
        f"{ours.milliseconds:.2f}" if ours.turns else "–",
    ]
    return "| " + " | ".join(parts) + " |"


def _quality(form: Form) -> str:
    if not form.quality:
        return "–"
    told = [f"{form.quality['sqnr']:.1f} dB"]
    if "cosine" in form.quality:
        told.append(f"cosine {form.quality['cosine']:.4f}")
    if "top1" in form.quality:
        told.append(f"top-1 {form.quality['top1']:.0%}")
    return ", ".join(told)


def _means(cells: Sequence[Cell]) -> Iterator[str]:
    """Geometric means by target, of the models that have the figure."""
    for target in dict.fromkeys(cell.target for cell in cells):
        mine = [cell for cell in cells if cell.target == target]
        means = []
        for other in ("float", "own"):
            ratios = [ratio.value for cell in mine if (ratio := cell.against(other)) is not None]
            means.append(f"{geometric_mean(ratios):.2f} (of {len(ratios)})" if ratios else "–")
        title = TARGETS[target].title
        yield f"| geometric mean | {title} | | | {means[0]} | {means[1]} | |"


def _failures(cells: Sequence[Cell]) -> Iterator[str]:
    for cell in cells:
        contender = TARGETS[cell.target]
        names = {"ours": "backquant", "float": "float", "own": contender.own}
        if cell.failed:
            yield f"- {cell.model}, {contender.title}: {cell.failed}"
        for name, form in cell.forms.items():
            if form.failed:
                yield f"- {cell.model}, {contender.title}, {names[name]}: {form.failed}"


def _floats(cells: Sequence[Cell]) -> Iterator[str]:
    """Operators by reason: those that were quantized, and those that no delegate took."""
    titles = {
        "left_in_float": "quantized, and computed in float",
        "undelegated": "outside of the delegates",
    }
    for cell in cells:
        for key, title in titles.items():
            reasons: dict[str, list[str]] = {}
            for node, reason in cell.facts.get(key, ()):
                reasons.setdefault(reason, []).append(node)
            for reason, nodes in reasons.items():
                shown = ", ".join(nodes[:3]) + (" …" if len(nodes) > 3 else "")
                where = f"{cell.model}, {TARGETS[cell.target].title}"
                yield f"- {where}: {len(nodes)} {title} ({shown}): {reason}"
