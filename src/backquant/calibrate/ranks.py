"""One state for all ranks of a distributed run.

``DistributedDataParallel`` copies the buffers of rank 0 to every rank before each forward; then each
rank measures its own batch. After a step the ranks differ by that batch, and would convert to
different qparams. Histograms it leaves alone (see ``PreparedModule``): each rank has its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from backquant.calibrate.observers import saw_data
from backquant.errors import UsageError
from backquant.observe import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver
from backquant.observe.qparams import with_shape
from backquant.prepare import buffers_of_histograms, prepared_state

_WIDENS = (MinMaxObserver, PerChannelMinMaxObserver)
_EMPTY = {"min_val": float("inf"), "max_val": float("-inf")}


def synchronize_observers(prepared: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Make observers, fake-quantizers and batch-norm statistics equal on all ranks, in place.

    Call it on every rank before ``convert_fx`` or evaluation; then all ranks convert to the same model.

    1. Minimum and maximum observers, per tensor or per channel: the widest range of all ranks.
    2. Histograms: merged; exact. Call it once, at the end: a second call counts again what the
       first has merged.
    3. Every other buffer (moving averages, batch-norm statistics, switches): rank 0's, as
       ``DistributedDataParallel`` has it at the next forward. A moving average depends on the order
       of the batches, so there is nothing to merge.

    Parameters are left alone: the optimizers keep them equal.

    Args:
        prepared: from ``prepare_qat_fx`` or ``prepare_fx``, or its ``DistributedDataParallel``.
        group: the ranks that take part. Default: all.

    Raises:
        UsageError: there is no process group, the model is not prepared, or ranks have different models.

    >>> synchronize_observers(nn.ReLU())
    Traceback (most recent call last):
    backquant.errors.UsageError: there are no ranks to synchronize
      where  synchronize_observers
      fix    call it between init_process_group and destroy_process_group, on every rank
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "there are no ranks to synchronize",
            where="synchronize_observers",
            fix="call it between init_process_group and destroy_process_group, on every rank",
        )
    model = prepared.module if isinstance(prepared, DistributedDataParallel) else prepared
    prepared_state(model)
    widening = dict(_widening(model))
    histograms = set(buffers_of_histograms(model))
    _check_same(list(dict(model.named_buffers())), group)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in histograms}
    _agree_on_shapes(buffers, widening, group)
    first = dist.get_global_rank(group, 0) if group is not None else 0
    for name, buffer in buffers.items():
        if name in widening:
            lowest = widening[name] == "min_val"
            dist.all_reduce(buffer, dist.ReduceOp.MIN if lowest else dist.ReduceOp.MAX, group)
        else:
            dist.broadcast(buffer, first, group)
    for module in model.modules():
        if isinstance(module, HistogramObserver):
            _merge(module, group)
    for module in model.modules():
        _recalculate(module)


def _gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What every rank gives, in the order of ranks."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, value, group)
    return every


def _check_same(names: list[str], group: dist.ProcessGroup | None) -> None:
    if any(other != names for other in _gathered(names, group)):
        raise UsageError(
            "the ranks hold different models: the names of their buffers differ",
            where=f"rank {dist.get_rank(group)}",
            fix="prepare the same model with the same backend and QConfigMapping on every rank",
        )


def _merge(histogram: HistogramObserver, group: dist.ProcessGroup | None) -> None:
    states = _gathered(histogram.state_dict(), group)
    twin = copy.deepcopy(histogram)
    histogram.reset_min_max_vals()
    for state in states:
        twin.load_state_dict(state)
        histogram.merge(twin)


def _widening(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of the buffers of rule 1, each with its name in its observer."""
    for path, module in model.named_modules():
        if type(module) in _WIDENS:
            for name in _EMPTY:
                yield f"{path}.{name}", name


def _agree_on_shapes(
    buffers: dict[str, torch.Tensor], widening: dict[str, str], group: dist.ProcessGroup | None
) -> None:
    """Per channel, the length of a buffer is known after the first batch only."""
    every = _gathered({name: tuple(b.shape) for name, b in buffers.items()}, group)
    for name, buffer in buffers.items():
        shape = every[0][name]
        if name in widening:
            shape = next((other[name] for other in every if 0 not in other[name]), shape)
        if buffer.shape != shape:
            with_shape(buffer, shape).fill_(_EMPTY[widening[name]] if name in widening else 0)


def _recalculate(module: Any) -> None:
    """Scale and zero point of a fake-quantizer over an observer of rules 1 and 2."""
    measured: Any = getattr(module, "activation_post_process", None)
    if type(measured) in (*_WIDENS, HistogramObserver) and saw_data(measured):
        scale, zero_point = measured.calculate_qparams()
        with_shape(module.scale, scale.shape).copy_(scale)
        with_shape(module.zero_point, zero_point.shape).copy_(zero_point)
