"""Calibration in the one call: needed only where something is quantized statically."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import torch
from torch import fx, nn

from backquant.calibrate.batches import check_set, check_some, count_of, first_batch, inputs_of
from backquant.calibrate.checkpoint import (
    Checkpoint,
    Kept,
    check_mergeable,
    fingerprint,
    load_observers,
    merge_observers,
    state_of,
)
from backquant.calibrate.feed import (
    CalibrationReport,
    Progress,
    ProgressBar,
    bound_arguments,
    calibrate,
    check_interface,
    check_values,
    described,
    measured_inputs,
    misfit,
    unseen_observers,
    waiting_for_data,
)
from backquant.calibrate.group import ALONE, Ranks
from backquant.calibrate.observers import (
    measured_again,
    passing_through,
    prepared_parts,
    site_observers,
    unchanged_on_error,
)
from backquant.calibrate.packed import PackedConvolutions
from backquant.errors import BackquantError, CalibrationError, InputError, UsageError
from backquant.graph import get_module
from backquant.graph.export import interface_of
from backquant.prepare import Role, prepared_state, with_state

# Calibration in the order of layers: all batches go through one part of the model before the next begins.
#
# 1. Each weight is read once for many batches, where a call of the model for every batch reads all of them
#    each time. What passes from one part to the next is kept for each of these batches; nothing else is.
# 2. A part ends where the weights that it reads are more than ``PART`` bytes.
# 3. An observer that is used in several parts sees the values of one part for all batches first. So those
#    whose state depends on the order are refused; that of the others is the same as after ``calibrate``,
#    bit for bit.


PART = 64 << 20  # bytes
_AT_ONCE = 32  # batches


def calibrate_by_layer(
    prepared: fx.GraphModule, batches: Iterable[Any], *, progress: Progress | None = None
) -> CalibrationReport:
    """``calibrate`` in the order of layers. Raises as it does, and ``ConfigError`` for observers whose
    state depends on the order of values. After an error the observers hold parts of batches.

    >>> from torch import nn
    >>> from backquant import get_default_qconfig_mapping, prepare_fx
    >>> model = nn.Sequential(nn.Linear(2, 2)).eval()
    >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), torch.zeros(1, 2))
    >>> calibrate_by_layer(prepared, [torch.zeros(1, 2), torch.ones(3, 2)])
    CalibrationReport(batches=2, unseen=())
    """
    check_set(batches)
    batches = inputs_of(prepared, batches)
    check_mergeable(prepared)
    observers, parts = site_observers(prepared), list(parts_of(prepared, PART))
    iterator, done, fitted = iter(batches), 0, ""
    packed = PackedConvolutions.of(prepared, observers.values())
    with torch.no_grad(), passing_through(prepared, measured_again(prepared)):
        while some := list(islice(iterator, _AT_ONCE)):
            try:
                with unchanged_on_error(observers.values() if packed else ()):
                    words = _measured(prepared, some, done, parts, fitted, packed)
            except InputError:
                if not packed:
                    raise
                packed = PackedConvolutions()  # as ``calibrate`` does
                words = _measured(prepared, some, done, parts, fitted, packed)
            done, fitted = done + len(some), words
            if progress is not None:
                progress(done, None)
    check_some(done, batches)
    return CalibrationReport(done, unseen_observers(prepared, observers))


def _measured(
    prepared: fx.GraphModule,
    some: list[Any],
    first: int,
    parts: list[list[fx.Node]],
    fitted: str,
    packed: PackedConvolutions,
) -> str:
    """Let ``some`` batches, which are counted from ``first``, through all parts; words for the last one."""
    runs = [_Run.of(prepared, batch, first + place) for place, batch in enumerate(some)]
    with packed.used():
        for part in parts:
            for run in runs:
                run.through(part, fitted)
            packed.forget()  # a second copy of the weights of one part, not of all
    return runs[-1].words


def parts_of(prepared: fx.GraphModule, most: int) -> Iterator[list[fx.Node]]:
    """Rule 2: the nodes of ``prepared`` in order, part by part.

    >>> model = fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    >>> [[node.name for node in part] for part in parts_of(model, 30)]
    [['input_1', '_0', '_1'], ['output']]
    """
    part: list[fx.Node] = []
    size = 0
    for node in prepared.graph.nodes:
        if size > most:
            yield part
            part, size = [], 0
        part.append(node)
        size += _bytes_read(prepared, node)
    yield part


def _bytes_read(prepared: fx.GraphModule, node: fx.Node) -> int:
    if node.op == "call_module":
        module = get_module(prepared, str(node.target))
        return sum(p.numel() * p.element_size() for p in module.parameters())
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        value = getattr(get_module(prepared, owner), name)
        return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
    return 0


@dataclass
class _Run:
    """One batch on its way; ``words`` describe it."""

    prepared: fx.GraphModule
    interpreter: fx.Interpreter
    bound: Any
    index: int
    words: str

    @classmethod
    def of(cls, prepared: fx.GraphModule, batch: Any, index: int) -> _Run:
        bound = bound_arguments(prepared, batch, index)
        check_values(bound, index, measured_inputs(prepared))
        interface = interface_of(prepared)
        if interface is not None:
            check_interface(interface, bound, index)
        words = described(bound)
        bound.apply_defaults()
        interpreter = fx.Interpreter(prepared)
        interpreter.extra_traceback = False
        args = prepared.graph.process_inputs(*bound.args, *bound.kwargs.values())
        interpreter.args_iter = iter(args)
        interpreter.env = {}
        return cls(prepared, interpreter, bound, index, words)

    def through(self, part: list[fx.Node], fitted: str) -> None:
        """Compute the nodes of ``part``, and forget what nobody reads behind them."""
        own = self.interpreter
        try:
            for node in part:
                own.env[node] = own.run_node(node)
                for used in own.user_to_last_uses.get(node, ()):
                    del own.env[used]
        except BackquantError:
            raise
        except Exception as error:
            raise misfit(self.prepared, self.bound, self.index, fitted, error) from error


_SHOWN = 8


class Feed(Protocol):
    """What runs a prepared model on all batches."""

    def __call__(
        self, prepared: fx.GraphModule, batches: Iterable[Any], *, progress: Progress | None
    ) -> CalibrationReport: ...


def measure(
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
    >>> from backquant.api.fx import prepare_fx
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


# Values that quantization makes zero: all of them nearer to it than half the smallest scale.


def tiny_values(prepared: fx.GraphModule) -> tuple[tuple[str, float], ...]:
    """What was measured to be smaller than half of its observer's ``eps``, with that smallest scale.

    Zeros alone are none of these: they stay what they are. A value whose observer keeps no ``min_val``,
    ``max_val`` and ``eps``, or measures each channel apart, is not known of.

    >>> import torch
    >>> from backquant import get_default_qconfig_mapping, prepare_fx
    >>> model = nn.Sequential(nn.Linear(2, 2)).eval()
    >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), torch.zeros(1, 2))
    >>> _ = prepared(torch.full((1, 2), 1e-9))
    >>> [name for name, _ in tiny_values(prepared)]
    ['input_1']
    """
    found: dict[str, float] = {}
    for prefix, part in prepared_parts(prepared):
        sites = prepared_state(part).sites
        for head in sites.groups():
            smallest = _smallest_scale(part.get_submodule(head))
            if sites[head].role is not Role.WEIGHT and smallest is not None:
                found[f"{prefix}{sites[head].value}"] = smallest
    return tuple(found.items())


def _smallest_scale(observer: nn.Module) -> float | None:
    """``eps`` of an observer that measured nothing but values that become zero with it."""
    measuring = getattr(observer, "activation_post_process", observer)
    low, high, eps = (getattr(measuring, name, None) for name in ("min_val", "max_val", "eps"))
    if not all(isinstance(part, torch.Tensor) and part.numel() == 1 for part in (low, high, eps)):
        return None
    assert low is not None and high is not None and eps is not None
    reach = max(abs(float(low)), abs(float(high)))
    return float(eps) if 0 < reach < float(eps) / 2 else None
