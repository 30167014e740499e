"""What ``quantize`` says of its result: how accurate it is, and where little of it is quantized."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from backquant.accuracy.calibrated import LEAST_DECIBELS, LOW, Calibrated
from backquant.accuracy.figures import MOST_LOSS, ErrorSums, bounded_loss, decibels
from backquant.accuracy.outputs import costliest, sqnr_by_output
from backquant.calibrate.group import Ranks
from backquant.errors import first_line, literal
from backquant.figures import Figures
from backquant.report.document import shortfall
from backquant.runtime import QuantizedModel

Metric = Callable[[Any], float]
_log = logging.getLogger("backquant")


def with_outcome(
    made: QuantizedModel, ready: Calibrated, metric: Metric | None, ranks: Ranks
) -> QuantizedModel:
    """``made``, whose report says how accurate it is; a warning in one line where little is quantized.

    The outputs are compared on one batch: the last of a calibration set that is a sequence, else the example
    inputs. Not where modules keep state from call to call, and not by several ranks, whose batches differ.
    """
    if not ready.stateful and ranks.size == 1:
        figures = _compared(made.record.figures, made, ready)
        made.record = replace(made.record, figures=_judged(figures, made, ready, metric))
    if _is_mostly_quantized(made):  # a report takes milliseconds
        return made
    report = made.report
    if short := shortfall(report):
        name = report.model or "the model"
        _log.warning("%s %s; print(quantized.report) says why", name, short)
    return made


def _is_mostly_quantized(made: QuantizedModel) -> bool:
    """Whether half of the multiply-adds are of nodes that the plan quantizes, and a kernel runs."""
    costs = made.record.costs
    if costs is None or not costs.multiply_adds:
        return False
    decisions = made.plan.decisions
    run = {name for use in made.kernels for name in use.nodes} if made.engine else decisions.keys()
    done = (
        count
        for name, count in costs.multiply_adds.items()
        if name in run and name in decisions and decisions[name].quantized
    )
    return 2 * sum(done) >= sum(costs.multiply_adds.values())


def _compared(figures: Figures, made: QuantizedModel, ready: Calibrated) -> Figures:
    batch, data = ready.example, "on the example inputs"
    if isinstance(ready.batches, Sequence) and len(ready.batches) > 0:
        batch, data = ready.batches[-1], "on the last calibration batch"
    batch = tree_map_only(torch.Tensor, lambda value: value.cpu(), batch)
    try:
        with torch.random.fork_rng(devices=[]):
            outputs, sums = _by_output(made, ready, batch)
    except Exception as error:  # a figure of the report; whoever calls the model meets the error
        why = f"the accuracy was not measured: {type(error).__name__}: {first_line(error)}"
        made.record = replace(made.record, plan=made.plan.noted(why))
        return figures
    figures, loss = replace(figures, outputs=outputs, data=data), bounded_loss(sums)
    if not loss < MOST_LOSS:  # a signal of zeros, or no number
        return figures
    return replace(figures, sqnr=decibels(loss), data=data)


def _by_output(
    made: QuantizedModel, ready: Calibrated, batch: Any
) -> tuple[dict[str, float], list[ErrorSums]]:
    """SQNR by output. Where little is left of one, the first note says so, and which operator costs most."""
    found, sums = sqnr_by_output(ready.frozen, made, ready.prepared, batch)
    figures = {str(place): sqnr for place, sqnr in found.items()}
    worst = min(found, key=found.__getitem__, default=None)
    if worst is None or not found[worst] < LEAST_DECIBELS:
        return figures, sums
    name, leaves_float = costliest(made, ready.prepared, batch, worst)
    note = f"little is left of {worst}: SQNR {found[worst]:.1f} dB; {name!r} costs most"
    if leaves_float:
        backend = literal(made.backend_config.name)
        note += f": qconfig_mapping=backquant.default_mapping({backend}).{leaves_float}"
    made.record = replace(
        made.record, plan=replace(made.plan, notes=(note, *_others(made.plan.notes)))
    )
    return figures, sums


def _others(notes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(note for note in notes if not note.startswith(LOW))


def _judged(
    figures: Figures, made: QuantizedModel, ready: Calibrated, metric: Metric | None
) -> Figures:
    if metric is None:
        return figures
    models: tuple[nn.Module, nn.Module] = (made, ready.frozen)
    with torch.no_grad():
        quantized, floating = (float(metric(model)) for model in models)
    return replace(figures, metric=quantized, float_metric=floating)
