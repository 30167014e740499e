"""``torchrun -m backquant quantize``: the processes that a launcher started, as one group.

Each rank takes every n-th batch, from its own number on; a ``DataLoader`` with a ``DistributedSampler`` is
taken as it is. Rank 0 writes the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from backquant.cli.data import Batches
from backquant.errors import RankError, first_line

_SAID_BY_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def launched(timeout: float) -> Iterator[dist.ProcessGroup | None]:
    """The group of all processes of the launcher; None where there is no launcher."""
    if not all(name in os.environ for name in _SAID_BY_LAUNCHERS):
        yield None
        return
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"the ranks do not find each other: {first_line(error)}",
            where=", ".join(f"{name}={os.environ[name]}" for name in _SAID_BY_LAUNCHERS),
            fix="torchrun --nproc-per-node 4 -m backquant quantize ...",
        ) from error
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This process's number in ``group``; 0 where it is alone."""
    return 0 if group is None else dist.get_rank(group)


def of_rank(batches: Iterable[Any], group: dist.ProcessGroup | None) -> Iterable[Any]:
    """What of ``batches`` this rank measures.

    >>> of_rank([1, 2], None)
    [1, 2]
    """
    if group is None or isinstance(getattr(batches, "sampler", None), DistributedSampler):
        return batches
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if isinstance(batches, Batches):
        return batches.every(size, rank)
    if isinstance(batches, Iterator):  # read once: what looks at the first batch must know that
        return islice(batches, rank, None, size)
    return _Every(batches, rank, size)


class _Every:
    """Every n-th batch of any iterable; what lies between is read, and left."""

    def __init__(self, batches: Iterable[Any], rank: int, size: int) -> None:
        self._batches, self._rank, self._size = batches, rank, size

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._batches), self._rank, None, self._size)
