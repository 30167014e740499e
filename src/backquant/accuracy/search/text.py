"""A search as text for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from backquant.accuracy.figures import decibel_text, decibels
from backquant.accuracy.search.result import ChosenOption, SearchResult
from backquant.accuracy.search.trials import Trial
from backquant.accuracy.text import table

TRIAL_HEADS = ("combination", "budget", "SQNR", "metric", "predicted", "measured", "speed")
ROW_HEADS = ("operator", "became", "why")


def renderable(found: SearchResult) -> Group:
    """A line for the answer, what was tried, and what each operator became."""
    backend = found.model.backend_config.name
    word = "kept" if found.met else "NOT kept"
    stopped = " (stopped before its end)" if found.stopped else ""
    head = f"{backend}, {found.budget}: {word}{stopped}; {answer(found)}"
    parts: list[RenderableType] = [Text(head, style="bold")]
    if found.hindrance:
        parts.append(Text(f"in the way: {found.hindrance}"))
    if found.stopped:
        parts.append(Text(f"stopped: {found.stopped}"))
    rows = (
        (
            combination_name(found, trial),
            "kept" if not trial.misses(found.budget) else "missed",
            *cells(trial),
        )
        for trial in found.trials
    )
    parts += [Text(""), table(TRIAL_HEADS, rows)]
    in_float = [row for row in found.rows if row.option == "float"]
    if found.rows:
        count = f"{len(in_float)} of {len(found.rows)} operators stay float"
        parts += [Text(""), Text(count), table(ROW_HEADS, (row_cells(row) for row in in_float))]
    return Group(*parts)


def answer(found: SearchResult) -> str:
    """The figures of the answer in words."""
    best = found.best
    words = [f"SQNR {decibel_text(decibels(best.loss))} (higher is better)"]
    if best.metric is not None and found.in_float is not None:
        words.append(f"metric {best.metric:.6g} ({found.in_float:.6g} in float)")
    if best.ms is not None and best.float_ms is not None:
        words.append(f"{best.ms:.3g} ms ({best.float_ms / best.ms:.2f} times as fast as float)")
    else:
        words.append(f"{best.bitops:.3g} bit-operations")
    words.append(f"{best.bytes / 1e6:.3g} MB of weights")
    return ", ".join(words)


def combination_name(found: SearchResult, trial: Trial) -> str:
    """What a trial is called: how much of it is quantized, and whether it is the answer."""
    mark = "→ " if trial.picks == found.best.picks else ""
    picks = [trial.picks[place] for place in found.places] or trial.picks
    return f"{mark}{sum(map(bool, picks))} of {len(picks)} operators quantized"


def cells(trial: Trial) -> tuple[str, ...]:
    """The cells of a trial, under ``TRIAL_HEADS`` after the first two."""
    return (
        decibel_text(decibels(trial.loss)),
        "" if trial.metric is None else f"{trial.metric:.6g}",
        "" if trial.predicted_ms is None else f"{trial.predicted_ms:.3g} ms",
        "" if trial.ms is None else f"{trial.ms:.3g} ms",
        "" if trial.ms is None or trial.float_ms is None else f"{trial.float_ms / trial.ms:.2f} ×",
    )


def row_cells(row: ChosenOption) -> tuple[str, ...]:
    """The cells of a unit, under ``ROW_HEADS``."""
    return f"{row.name}  {row.operator}", row.option, row.why
