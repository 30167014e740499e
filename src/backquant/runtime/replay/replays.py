"""Which recording answers a call.

Invariants

1. A call is replayed only for arguments like those of its recording: the same structure, and for each
   tensor the same shape, dtype, strides and offset. And with as many threads: PyTorch's kernels share values
   among them, and the last ones of a share may be rounded otherwise; what depends on no input was computed
   when the program was made.
2. Inputs of a new kind run operator by operator the first time, are recorded the second time and
   replayed from then on: what is seen once costs nothing. The few latest kinds are kept.
3. Nothing is replayed where someone looks: under hooks, another dispatch or function mode, a profiler's
   or compiler's trace, or with tensors of other classes.
4. A kernel that drops its packed weight (``load_state_dict``, ``to``) makes every recording void.
5. A parameter or buffer that was replaced (``load_state_dict(assign=True)``, an attribute set, new
   ``.data``) makes the recordings void that read it.
6. In a process that was forked nobody else records.
7. A batch may be computed sample by sample: if the operators give each sample the same bits in any batch.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.fx import GraphModule

from backquant.graph.export import Interface
from backquant.graph.interception import is_watched
from backquant.lower.kernels.configured import packings
from backquant.operators.samples import Mixed
from backquant.runtime.heap import give_back
from backquant.runtime.interpreted import Interpreted
from backquant.runtime.replay.in_parts import Called, in_parts
from backquant.runtime.replay.program import Program, unavailable
from backquant.runtime.replay.record import (
    Arguments,
    NotReplayable,
    Recording,
    known_constants,
    record,
)
from backquant.runtime.replay.shortened import shortened

_KEPT = 8  # kinds of inputs for which a recording is kept; it holds only tensors of the model
_SEEN = "seen once"
_CODE = ("torch.", "backquant.", "_operator", "builtins", "math", "operator")


class Replays:
    """The recordings of one module.

    ``refused`` says why the latest new kind of inputs is not replayed, ``together`` why a batch of it is
    computed as a whole only, never sample by sample (``in_parts``). ``interface``: of a model that was
    exported. Arguments are checked against it where they are of a new kind.

    >>> replays = Replays(nn.ReLU())
    >>> x = torch.tensor([-1.0, 2.0])
    >>> [replays(x).tolist() for _ in range(3)], replays.programs, replays.refused
    ([[0.0, 2.0], [0.0, 2.0], [0.0, 2.0]], 1, '')
    """

    def __init__(self, module: nn.Module, interface: Interface | None = None) -> None:
        self.module = module
        self._interface = interface
        self._takes_objects = interface is not None and bool(interface.arguments)
        self._interpreted = Interpreted(module)
        self.refused = unavailable() or _foreign_code(module)
        self.together = ""
        self._never = bool(self.refused)
        self._found: _Kept = OrderedDict()
        self._lock = threading.Lock()
        _live.add(self)
        self._packings = packings()
        self._hooks = [
            found
            for part in module.modules()
            for found in (part._forward_hooks, part._forward_pre_hooks)
        ]

    @property
    def programs(self) -> int:
        """How many kinds of inputs are recorded."""
        return sum(isinstance(found, _Recorded) for found in self._found.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives for these arguments."""
        if self._never or any(self._hooks) or is_watched():
            return self._plainly(args, kwargs)
        given = Arguments(args, kwargs, takes_objects=self._takes_objects)
        if given.kind is None:
            return self._plainly(args, kwargs)
        key = given.kind, torch.get_num_threads()
        now = packings()
        # a new dict: another thread that is recording writes to the old one, which nobody reads
        if now != self._packings:
            self._packings, self._found = now, OrderedDict()
        kept = self._found
        found = kept.get(key)
        if isinstance(found, _Recorded):
            if all(place.is_unchanged() for place in found.read):
                if len(kept) == _KEPT:
                    self._used(kept, key)
                return found.program(given.tensors)
            kept.pop(key, None)  # another thread may have removed it already
            found = None
        if found is None:
            return self._first(kept, key, args, kwargs)
        if found is not _SEEN or not self._lock.acquire(blocking=False):
            return self._plainly(args, kwargs)
        try:
            return self._record(kept, key, args, kwargs)
        finally:
            self._lock.release()

    def _plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._interface is not None:
            self._interface.check(args, kwargs)
        return self._interpreted(*args, **kwargs)

    def _used(self, kept: _Kept, key: Hashable) -> None:
        """The kind that was not used for the longest time is the next to go."""
        if self._lock.acquire(blocking=False):
            try:
                with suppress(KeyError):  # another thread has removed it
                    kept.move_to_end(key)
            finally:
                self._lock.release()

    def _first(self, kept: _Kept, key: Hashable, args: Any, kwargs: dict[str, Any]) -> Any:
        result = self._plainly(args, kwargs)
        with self._lock:
            kept[key] = _SEEN
            while len(kept) > _KEPT:
                kept.popitem(last=False)
        return result

    def _record(self, kept: _Kept, key: Hashable, args: Any, kwargs: dict[str, Any]) -> Any:
        constants = partial(known_constants, self.module)
        result, recording = record(self.module, args, kwargs, constants)
        made: _Recorded | str
        try:
            if isinstance(recording, NotReplayable):
                raise recording
            places = _places(self.module, recording.constants.values())
            tensors = Arguments(args, kwargs, takes_objects=self._takes_objects).tensors
            called = Called(self.module, args, kwargs, tensors, constants, result)
            made = _Recorded(self._program(recording, called), places)
        except (NotReplayable, RuntimeError, AttributeError) as problem:
            made = str(problem)
        self.refused = made if isinstance(made, str) else ""
        if not self.programs:  # after the first recording: memory that packing weights freed
            give_back()
        kept[key] = made
        return result

    def _program(self, whole: Recording, called: Called) -> Way:
        """``whole`` as a program, beside it in parts where that can be."""
        program = Program(shortened(whole))
        try:
            parts = in_parts(whole, program, called)
        except Mixed as problem:
            self.together = str(problem)
            return program
        except Exception as problem:  # the call has its result, and the whole can be replayed
            self.together = f"{type(problem).__name__}: {problem}"
            return program
        self.together = ""
        return Fastest([program, *parts])


_Kept: TypeAlias = "OrderedDict[Hashable, _Recorded | str]"
_live: weakref.WeakSet[Replays] = weakref.WeakSet()


def _begin_child() -> None:
    """Invariant 6."""
    for replays in list(_live):
        replays._lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_begin_child)


class _Recorded(NamedTuple):
    program: Way
    read: list[_Place]


class _Place:
    """Where a module holds a tensor that a recording reads."""

    __slots__ = ("address", "key", "owner", "tensor")

    def __init__(self, owner: dict[str, Any], key: str, tensor: torch.Tensor) -> None:
        self.owner, self.key, self.tensor = owner, key, tensor
        self.address = tensor.data_ptr()

    def is_unchanged(self) -> bool:
        held = self.owner.get(self.key)
        return held is self.tensor and held.data_ptr() == self.address


def _places(module: nn.Module, tensors: Iterable[torch.Tensor]) -> list[_Place]:
    """Where ``module`` holds those of ``tensors`` that are parameters, buffers or attributes."""
    wanted = {id(tensor) for tensor in tensors}
    owners = [held for part in module.modules() for held in (part._parameters, part._buffers)]
    return [
        _Place(owner, key, tensor)
        for owner in (*owners, vars(module))
        for key, tensor in owner.items()
        if isinstance(tensor, torch.Tensor) and id(tensor) in wanted
    ]


def _foreign_code(module: nn.Module) -> str:
    """Which code, not torch's or ours, the module runs: it may do what a recording does not see."""
    for name, part in module.named_modules():
        if not type(part).__module__.startswith(_CODE):
            return f"{name} is a {type(part).__name__}, which may do more than call operators"
        if isinstance(part, GraphModule):
            for node in part.graph.nodes:
                home = getattr(node.target, "__module__", "") or ""
                if node.op == "call_function" and not f"{home}.".startswith(_CODE):
                    return f"{node.name} calls {node.target}"
    return ""


# Which of several ways to compute the same is the fastest: found out on the calls themselves.
#
# All ways give the same bits, so that each call may take any of them. The first calls take the ways in turns
# and measure; from then on the fastest is taken, until torch uses another number of threads.

Way = Callable[[list[torch.Tensor]], Any]

_ROUNDS = 4  # of which the first does not count: caches and threads are not warm
_GAIN = 0.97  # of the time of the first way, that another one may take to be preferred to it
_HOPELESS = 3.0  # times the shortest call so far: such a way is not tried again


class Fastest:
    """Calls one of ``ways``.

    >>> both = Fastest([lambda x: x[0] + 1, lambda x: [torch.ones(999999), x[0] + 1][1]])
    >>> [both([torch.ones(1)]).item() for _ in range(9)][-1], both.chosen
    (2.0, 0)
    """

    def __init__(self, ways: Sequence[Way]) -> None:
        self.ways = list(ways)
        # by the number of threads, which may be another one in each thread that calls
        self._chosen: dict[int, int] = {}
        self._seconds: dict[int, list[list[float]]] = {}

    @property
    def chosen(self) -> int | None:
        """Which way is taken with as many threads as torch uses now; ``None`` while they are measured."""
        return self._chosen.get(torch.get_num_threads())

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        """The result for the flattened tensor arguments."""
        threads = torch.get_num_threads()
        chosen = self._chosen.get(threads)
        return self._measured(threads, tensors) if chosen is None else self.ways[chosen](tensors)

    def _measured(self, threads: int, tensors: list[torch.Tensor]) -> Any:
        seconds = self._seconds.setdefault(threads, [[] for _ in self.ways])
        way = min(self._hopeful(seconds), key=lambda i: len(seconds[i]))
        # what else the machine does in between is not this thread's
        clock = time.thread_time if threads == 1 else time.perf_counter
        start = clock()
        result = self.ways[way](tensors)
        seconds[way].append(clock() - start)
        hopeful = self._hopeful(seconds)
        if all(len(seconds[i]) >= _ROUNDS for i in hopeful):
            best = {i: min(seconds[i][1:]) for i in hopeful}
            fastest = min(best, key=best.__getitem__)
            first = best.get(0)
            self._chosen[threads] = 0 if first and best[fastest] >= _GAIN * first else fastest
        return result

    @staticmethod
    def _hopeful(seconds: list[list[float]]) -> list[int]:
        """The ways that are not several times as slow as another one; of those that are warm."""
        warm = [min(found[1:], default=math.inf) for found in seconds]
        least = min(warm)
        return [i for i, best in enumerate(warm) if math.isinf(best) or best <= _HOPELESS * least]
