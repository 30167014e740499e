"""One state for all ranks of a distributed run.

``DistributedDataParallel`` copies the buffers of rank 0 to every rank before each forward; then each
rank measures its own batch. After a step the ranks differ by that batch, and would convert to
different qparams.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from backquant.calibrate.observers import saw_data
from backquant.errors import UsageError
from backquant.observe import MinMaxObserver, PerChannelMinMaxObserver
from backquant.observe.storage import with_shape
from backquant.prepare import prepared_state

__all__ = ["synchronize_observers"]

_WIDENS = (MinMaxObserver, PerChannelMinMaxObserver)
_EMPTY = {"min_val": float("inf"), "max_val": float("-inf")}


def synchronize_observers(prepared: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Make observers, fake-quantizers and batch-norm statistics equal on all ranks, in place.

    Every rank calls it, before ``convert_fx`` or evaluation; then all convert to the same model.

    1. Minimum and maximum observers, per tensor or per channel: the widest range of all ranks.
    2. Every other buffer (moving averages, histograms, batch-norm statistics, switches): rank 0's,
       as ``DistributedDataParallel`` has it at the next forward. A moving average depends on the
       order of the batches, and a histogram that DDP copied would be counted twice.

    To merge histograms that were measured apart, see ``merge_state``. Parameters are left alone:
    the optimizers keep them equal.

    Args:
        prepared: from ``prepare_qat_fx`` or ``prepare_fx``, or its ``DistributedDataParallel``.
        group: the ranks that take part. Default: all.

    Raises:
        UsageError: no process group, a model that is not prepared, or another one on some rank.

    >>> from backquant.backend_config import BackendConfig
    >>> from backquant.graph import capture
    >>> from backquant.match import Plan
    >>> from backquant.prepare import insert_observers
    >>> from backquant.qconfig import QConfigMapping
    >>> module = capture(nn.Sequential(nn.ReLU())).module
    >>> prepared = insert_observers(module, Plan("x86"), BackendConfig("x86"), QConfigMapping())
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> synchronize_observers(prepared)
    >>> dist.destroy_process_group()
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
    buffers = dict(model.named_buffers())
    _agree_on_shapes(buffers, widening, group)
    first = dist.get_global_rank(group, 0) if group is not None else 0
    for name, buffer in buffers.items():
        if name in widening:
            lowest = widening[name] == "min_val"
            dist.all_reduce(buffer, dist.ReduceOp.MIN if lowest else dist.ReduceOp.MAX, group)
        else:
            dist.broadcast(buffer, first, group)
    for module in model.modules():
        _recalculate(module)


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
    own = {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    every: list[dict[str, tuple[int, ...]]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group)
    if any(list(other) != list(own) for other in every):
        raise UsageError(
            "the ranks hold different models: the names of their buffers differ",
            where=f"rank {dist.get_rank(group)}",
            fix="prepare the same model with the same backend and QConfigMapping on every rank",
        )
    for name, buffer in buffers.items():
        shape = every[0][name]
        if name in widening:
            shape = next((other[name] for other in every if 0 not in other[name]), shape)
        if buffer.shape != shape:
            with_shape(buffer, shape).fill_(_EMPTY[widening[name]] if name in widening else 0)


def _recalculate(module: Any) -> None:
    """Scale and zero point of a fake-quantizer over an observer of rule 1."""
    measured: Any = getattr(module, "activation_post_process", None)
    if type(measured) in _WIDENS and saw_data(measured):
        scale, zero_point = measured.calculate_qparams()
        with_shape(module.scale, scale.shape).copy_(scale)
        with_shape(module.zero_point, zero_point.shape).copy_(zero_point)
