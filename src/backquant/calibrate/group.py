"""One quantization by several processes: each measures its own batches, all go on with what all saw.

1. Every rank makes the same calls. What one rank has to give goes through the store of the group, not through
   collectives: a rank that is killed cannot keep the others waiting, and they can say which it was.
2. A rank gives a sign of life after each batch. Who waits for a rank that gave none for the group's timeout
   ends with an error that names it; so does who waits for a rank that ended with an error.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from backquant.calibrate.batches import called_on_example, check_set, data_from, example_from
from backquant.calibrate.observers import saw_data
from backquant.errors import BackquantError, RankError, UsageError, first_line
from backquant.graph.example_call import ExampleCall
from backquant.observe import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver
from backquant.observe.protocol import with_shape
from backquant.prepare import buffers_of_histograms, prepared_state

_PIECE = 16 << 20  # bytes; a store takes no values of any size
_FAREWELL = 10.0  # seconds that rank 0 waits for the others to end
_serial: Counter[str] = Counter()
_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


class Ranks(Protocol):
    """The processes that quantize together."""

    rank: int
    size: int

    def exchange(self, doing: str, value: Any) -> list[Any]:
        """What every rank gives, in the order of ranks. ``doing``: what the others wait for."""

    def alive(self) -> None:
        """Tell the others that this rank goes on; raises where one of them has ended."""


class _Alone:
    """One process."""

    rank, size = 0, 1

    def exchange(self, doing: str, value: Any) -> list[Any]:  # noqa: ARG002
        return [value]

    def alive(self) -> None:
        pass


ALONE = _Alone()


class _Group:
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._timeout = _timeout_of(group).total_seconds()
        name = str(group.group_name)
        _serial[name] += 1
        prefix = f"backquant/{name}/{_serial[name]}"
        self._store = dist.distributed_c10d.PrefixStore(
            prefix, dist.distributed_c10d._get_default_store()
        )
        self._steps = self._lives = 0
        self._pieces: dict[int, int] = {}

    def exchange(self, doing: str, value: Any) -> list[Any]:
        with self._reached(doing):
            step, self._steps = self._steps, self._steps + 1
            self._forget(step - 2)  # all have read it: they came as far as the step after it
            self._put(step, pickle.dumps(value))
            return [
                value if rank == self.rank else self._get(step, rank, doing)
                for rank in range(self.size)
            ]

    def alive(self) -> None:
        with self._reached("calibrating"):
            self._lives += 1
            self._store.set(f"alive/{self.rank}", str(self._lives))
            self._check_ended()

    def leave(self, error: BaseException | None = None) -> None:
        """Let the others know how this rank ended; rank 0, which may keep the store, does so last."""
        try:
            self._store.set(f"seen/{self.rank}", "1")
            if error is not None and not isinstance(error, RankError):
                self._store.compare_set("ended", "", pickle.dumps((self.rank, _said(error))).hex())
            end = time.monotonic() + min(self._timeout, _FAREWELL)
            waits = self.rank == 0
            while waits and time.monotonic() < end:
                waits = not all(self._store.check([f"seen/{rank}"]) for rank in range(self.size))
                time.sleep(0.02)
        except RuntimeError:
            pass  # the store is gone, and with it who could read

    def _put(self, step: int, payload: bytes) -> None:
        pieces = [payload[i : i + _PIECE] for i in range(0, len(payload), _PIECE)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{step}/{self.rank}/{number}", piece)  # type: ignore[arg-type]
        self._pieces[step] = len(pieces)
        self._store.set(f"{step}/{self.rank}", str(len(pieces)))

    def _get(self, step: int, rank: int, doing: str) -> Any:
        key = f"{step}/{rank}"
        life, since, pause = b"", time.monotonic(), 0.001
        while not self._store.check([key]):
            self._check_ended()
            alive = f"alive/{rank}"
            now = self._store.get(alive) if self._store.check([alive]) else b""
            if now != life:
                life, since = now, time.monotonic()
            if time.monotonic() - since > self._timeout:
                raise _silent(rank, self.size, self._timeout, doing)
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        pieces = int(self._store.get(key))
        return pickle.loads(b"".join(self._store.get(f"{key}/{n}") for n in range(pieces)))

    def _forget(self, step: int) -> None:
        for number in range(self._pieces.pop(step, 0)):
            self._store.delete_key(f"{step}/{self.rank}/{number}")

    def _check_ended(self) -> None:
        if self._store.check(["ended"]):
            rank, (kind, what, where, fix) = pickle.loads(
                bytes.fromhex(self._store.get("ended").decode())
            )
            if rank != self.rank:
                raise RankError(
                    what, where=_on(rank, where), fix=fix or f"rank {rank} raised {kind}"
                )

    @contextmanager
    def _reached(self, doing: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of the store
            raise RankError(
                f"the store of the group is gone: {first_line(error)}",
                where=f"rank {self.rank} of {self.size}, {doing}",
                fix="rank 0, or the launcher, keeps it and has ended: its own output says why",
            ) from error


@contextmanager
def sharing(group: dist.ProcessGroup | None) -> Iterator[Ranks]:
    """The ranks of ``group``; without one this process alone. An error of one ends all, by its words.

    Raises UsageError for a group that this process is not in.

    >>> with sharing(None) as ranks:
    ...     ranks.exchange("counting", 3)
    [3]
    """
    if group is None:
        yield ALONE
        return
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank(group) < 0:
        raise UsageError(
            "this process is in no such group",
            where="group",
            fix='torch.distributed.init_process_group("gloo") on every rank;\n'
            "then group=torch.distributed.group.WORLD",
        )
    ranks = _Group(group)
    try:
        yield ranks
    except BaseException as error:
        ranks.leave(error)
        if isinstance(error, BackquantError) and not isinstance(error, RankError):
            named = _on(ranks.rank, error.where)
            raise type(error)(error.what, where=named, fix=error.fix) from error
        raise
    ranks.leave()


def in_turn(ranks: Ranks, doing: str, own: list[Any]) -> list[Any]:
    """What all ranks give, their firsts first: rank r of n has every n-th item from r on.

    >>> in_turn(ALONE, "counting", [1, 2])
    [1, 2]
    """
    every = ranks.exchange(doing, own)
    longest = max(map(len, every))
    return [each[place] for place in range(longest) for each in every if place < len(each)]


def divided(
    ranks: Ranks, doing: str, items: Sequence[_Item], work: Callable[[_Item], _Made]
) -> Iterator[_Made]:
    """What ``work`` gives for each of ``items``, which are the same on all ranks: rank r of n does every n-th
    from r on, and all get everything, in order.

    >>> list(divided(ALONE, "counting", ["a", "bc"], len))
    [1, 2]
    """
    for start in range(0, len(items), ranks.size):
        place = start + ranks.rank
        own = [work(item) for item in items[place : place + 1]]
        yield from (made for given in ranks.exchange(doing, own) for made in given)


def by_rank_0(ranks: Ranks, doing: str, make: Callable[[], _Made]) -> _Made:
    """The result of ``make`` on rank 0, for all ranks: for times and what else depends on the machine.

    >>> by_rank_0(ALONE, "counting", lambda: 3)
    3
    """
    found: _Made = ranks.exchange(doing, make() if ranks.rank == 0 else None)[0]
    return found


def held_by_all(ranks: Ranks, batches: Iterable[Any], most: int) -> list[Any]:
    """The first ``most`` batches of all ranks, on every rank, in the order of ``in_turn``.

    >>> held_by_all(ALONE, iter("abc"), 2)
    ['a', 'b']
    """
    if ranks.size == 1:
        return list(islice(batches, most))
    own = iter(batches)
    held: list[Any] = []
    while len(held) < most:
        given = ranks.exchange("reading batches", [_alone(batch) for batch in islice(own, 1)])
        if not any(given):
            break
        held += [batch for some in given for batch in some]
    return held[:most]


def _alone(batch: Any) -> Any:
    """A batch without what lies around it in memory, which would be sent, too."""
    return tree_map_only(torch.Tensor, torch.Tensor.clone, batch)


def example_of_rank_0(
    ranks: Ranks, model: nn.Module, example_inputs: Any, calibration: Iterable[Any] | None
) -> tuple[ExampleCall, Iterable[Any] | None]:
    """``example_from`` of rank 0, for all; and this rank's own set, which still holds every batch."""
    if ranks.rank != 0:
        if calibration is not None:
            check_set(calibration)
        example = ranks.exchange("reading its first batch", None)[0]
        return called_on_example(model, example), calibration
    call, batches = example_from(model, example_inputs, calibration)
    ranks.exchange("reading its first batch", call.inputs)
    return call, batches


def data_of_rank_0(
    ranks: Ranks, model: nn.Module, example: Any, calibration: Iterable[Any] | None
) -> tuple[Any, Iterable[Any] | None]:
    """``data_from`` of rank 0, for all; and this rank's own set."""
    if ranks.rank != 0:
        return ranks.exchange("reading its first batch", None)[0], calibration
    data, batches = data_from(model, example, calibration)
    ranks.exchange("reading its first batch", data)
    return data, batches


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """What ``init_process_group`` was given; torch tells it of backends only."""
    try:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout
    return timeout if isinstance(timeout, timedelta) else dist.default_pg_timeout


def _said(error: BaseException) -> tuple[str, str, str, str]:
    kind = type(error).__name__
    if isinstance(error, BackquantError):
        return kind, error.what, error.where, error.fix
    return kind, f"a rank ended: {kind}: {first_line(error)}", "", ""


def _on(rank: int, where: str) -> str:
    return f"rank {rank}: {where}" if where else f"rank {rank}"


def _silent(rank: int, size: int, seconds: float, doing: str) -> RankError:
    return RankError(
        f"rank {rank} gave no sign of life for {seconds:g} s",
        where=f"rank {rank} of {size}, {doing}",
        fix="see its own output: it was killed, or hangs; with checkpoints (checkpoint=, --checkpoint) the\n"
        "next run goes on from there. For batches that take longer: init_process_group(timeout=...)",
    )


# One state for all ranks of a distributed run.
#
# ``DistributedDataParallel`` copies the buffers of rank 0 to every rank before each forward; then each rank
# measures its own batch. After a step the ranks differ by that batch, and would convert to different
# qparams. Histograms it leaves alone (see ``PreparedModule``): each rank has its own.


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
