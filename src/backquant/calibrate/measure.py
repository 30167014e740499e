"""Calibration in the one call: needed only where something is quantized statically."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

from torch import fx

from backquant.calibrate.batches import count_of, first_batch
from backquant.calibrate.checkpoint import Checkpoint, Kept, fingerprint
from backquant.calibrate.feed import CalibrationReport, calibrate, unseen_observers
from backquant.calibrate.group import ALONE, Ranks
from backquant.calibrate.needs import waiting_for_data
from backquant.calibrate.observers import site_observers
from backquant.calibrate.progress import Progress, ProgressBar
from backquant.calibrate.resume import check_mergeable, load_observers, merge_observers, state_of
from backquant.calibrate.tiny import tiny_values
from backquant.errors import CalibrationError, UsageError
from backquant.prepare import prepared_state, with_state

_SHOWN = 8


class Feed(Protocol):
    """What runs a prepared model on all batches."""

    def __call__(
        self, prepared: fx.GraphModule, batches: Iterable[Any], *, progress: Progress | None
    ) -> CalibrationReport: ...


def measure(  # size: a model, data, and one keyword per independent choice
    prepared: fx.GraphModule,
    batches: Iterable[Any] | None,
    *,
    progress: bool = False,
    ranks: Ranks = ALONE,
    checkpoint: Checkpoint | None = None,
    feed: Feed | None = None,
) -> CalibrationReport:
    """Feed ``batches`` to the observers, and merge what all ``ranks`` measured. None will do where no
    observer waits for data. ``feed``: how, in one process; default: ``calibrate``.

    The record of ``prepared`` notes which observers saw none, and which values are too small.

    Raises ``CalibrationError`` when there are none and values have to be measured; names them. Of several
    ranks, ``ConfigError`` for observers that cannot be merged.

    >>> import torch
    >>> from backquant.api.flow import prepare_fx
    >>> from backquant.qconfig import QConfigMapping, default_dynamic_qconfig
    >>> mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval()
    >>> measure(prepare_fx(model, mapping, torch.zeros(1, 4)), None)
    CalibrationReport(batches=0, unseen=())
    """
    if batches is None:
        _refuse_unmeasured(prepared)
        return CalibrationReport(0)
    kept = None if checkpoint is None else Kept(checkpoint, prepared, ranks)
    with ProgressBar("calibrating") if progress else nullcontext() as bar:
        if feed is not None:
            found = feed(prepared, batches, progress=bar)
        elif ranks.size == 1:
            found = _fed(prepared, batches, ranks, kept, bar)
        else:
            found = _merged(prepared, batches, ranks, kept, bar)
    if kept is not None:
        kept.remove()
    unseen = tuple(str(item.value) for item in found.unseen)
    state = replace(prepared_state(prepared), unseen=unseen, tiny=tiny_values(prepared))
    with_state(prepared, state)
    return found


def _fed(
    prepared: fx.GraphModule,
    batches: Iterable[Any],
    ranks: Ranks,
    kept: Kept | None,
    bar: Progress | None,
) -> CalibrationReport:
    """This process's batches."""
    number = count_of(batches)

    def measured(done: int, total: int | None) -> None:
        ranks.alive()
        if kept is not None:
            kept.write(done)
        if bar is not None:
            bar(done, number or total)

    first, rest = (0, batches) if kept is None else kept.rest(batches)
    return calibrate(prepared, rest, progress=measured, first=first)


def _merged(
    prepared: fx.GraphModule,
    batches: Iterable[Any],
    ranks: Ranks,
    kept: Kept | None,
    bar: Progress | None,
) -> CalibrationReport:
    """This process's batches, which may be none, and those of the others."""
    check_mergeable(prepared)
    if len(set(ranks.exchange("preparing", fingerprint(prepared)))) > 1:
        raise UsageError(
            "the ranks hold different models, or ask for different things",
            where="group",
            fix="load the same weights on every rank, and pass the same backend and QConfigMapping",
        )
    every = site_observers(prepared)
    observers = {item.site: every[item.site] for item in waiting_for_data(prepared)}
    has_some, batches = _has_some(batches)
    done = _fed(prepared, batches, ranks, kept, bar).batches if has_some else 0
    given = ranks.exchange("calibrating", (done, state_of(observers)))
    total = sum(batches for batches, _ in given)
    if total == 0:
        raise CalibrationError(
            "the calibration sets of all ranks are empty",
            where="calibration",
            fix="pass at least one batch to one of them",
        )
    load_observers(observers, given[0][1])
    merge_observers(observers, [state for _, state in given[1:]])
    return CalibrationReport(total, unseen_observers(prepared, every))


def _has_some(batches: Iterable[Any]) -> tuple[bool, Iterable[Any]]:
    try:
        return True, first_batch(batches)[1]
    except CalibrationError:
        return False, ()


def _refuse_unmeasured(prepared: fx.GraphModule) -> None:
    values = list(dict.fromkeys(item.value for item in waiting_for_data(prepared)))
    if not values:
        return
    shown = ", ".join(values[:_SHOWN])
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    raise CalibrationError(
        "values that are quantized statically have to be measured, and there is no calibration set",
        where=f"{shown}{more}",
        fix="calibration=[batch, ...]",
    )
