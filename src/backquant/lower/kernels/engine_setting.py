"""torch's quantized engine, a setting of the whole process that packing reads – and some kernels, too.

Weights are packed for the engine that is set. While it is qnnpack, some of torch's ``quantized::`` kernels on
uint8 are qnnpack's, and round otherwise than the rest (hard-swish, by one step). So a model that runs and a
weight that is packed for qnnpack keep out of each other's way; and where the user has set qnnpack, models run
with another engine set: their bits do not depend on the setting, nor on when it is changed.

Invariants

1. The setting is changed by one thread at a time, and put back.
2. While it is changed to or from qnnpack, no lowered model runs in any thread.
3. A model that packs weights in its first call gives up its turn for the packing, so that two such models do
   not wait for each other.
4. A lowered model runs while another engine than qnnpack is set, where torch has another one. The user's
   setting is back when no model runs.
5. In a process that was forked only the thread that forked runs or packs; the setting is what it was.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from backquant.lower.machine import quantized_engines

_OTHER_ROUNDING = "qnnpack"
_changed: list[str] = []  # the engine that was set before, to be set again


class _Turns:
    """Many may run, or one may change the setting."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._change = threading.Condition(self._lock)
        self._running = 0
        self.packing = threading.RLock()
        self._own = threading.local()
        self._users = ""  # the engine that the user has set, while another one is

    def runs_here(self) -> bool:
        """Whether this thread is running a model already."""
        return self._depth() > 0

    def begin_without(self, engine: str) -> None:
        """``enter``, with another engine set than the user's until nobody runs: invariant 4."""
        others = [name for name in quantized_engines() if name not in (engine, "none")]
        backend: Any = torch.backends.quantized
        with self.packing, self._change:
            if others and backend.engine == engine and not _changed:  # one that packs keeps its own
                self._users, backend.engine = engine, others[0]
            self.enter()

    def _depth(self) -> int:
        depth: int = getattr(self._own, "depth", 0)
        return depth

    def enter(self) -> None:
        # each call of a model comes through here: the lock itself is quicker than the condition
        depth = self._depth()
        if depth == 0:
            with self._lock:
                self._running += 1
        self._own.depth = depth + 1

    def leave(self) -> None:
        self._own.depth = depth = self._depth() - 1
        if depth == 0:
            with self._lock:
                self._running -= 1
                if self._running == 0:
                    self._put_back()
                    self._change.notify_all()

    def _put_back(self) -> None:
        """The user's engine, when nobody runs or packs."""
        if self._users and self._running == 0 and not _changed:
            backend: Any = torch.backends.quantized
            self._users, backend.engine = "", self._users

    def begin_child(self) -> None:
        """Forget other threads: after a fork only the one that forked is left."""
        self._lock = threading.RLock()
        self._change = threading.Condition(self._lock)
        self.packing = threading.RLock()
        self._running = int(self._depth() > 0)
        self._put_back()

    @contextmanager
    def released_read_lock(self) -> Iterator[None]:
        """A thread that runs does not, within the block."""
        depth = self._depth()
        for _ in range(depth):
            self.leave()
        try:
            yield
        finally:
            for _ in range(depth):
                self.enter()

    @contextmanager
    def setting(self, engine: str) -> Iterator[None]:
        """``engine`` is set within the block; to and from qnnpack while nobody runs, and whoever begins to
        waits. The thread holds ``packing``."""
        backend: Any = torch.backends.quantized
        with self._change:
            if _OTHER_ROUNDING in (engine, backend.engine):
                self._change.wait_for(lambda: self._running == 0)
            before = str(backend.engine)
            _changed.append(before)
            backend.engine = engine
            if _OTHER_ROUNDING in (engine, before):
                try:
                    yield
                finally:
                    self._reset(before)
                return
        try:
            yield
        finally:
            with self._change:
                self._reset(before)

    def _reset(self, before: str) -> None:
        backend: Any = torch.backends.quantized
        backend.engine = before
        _changed.pop()
        self._put_back()


_TURNS = _Turns()


class _Running:
    def __enter__(self) -> None:
        if str(torch.backends.quantized.engine) == _OTHER_ROUNDING and not _TURNS.runs_here():
            _TURNS.begin_without(_OTHER_ROUNDING)
        else:
            _TURNS.enter()

    def __exit__(self, *_: object) -> None:
        _TURNS.leave()


_RUNNING = _Running()


def running() -> _Running:
    """While a lowered model runs within the block, nobody changes how its kernels round.

    >>> with running():
    ...     torch.relu(torch.tensor([-1.0]))
    tensor([0.])
    """
    return _RUNNING


@contextmanager
def packing_for(engine: str) -> Iterator[None]:
    """Weights are packed for this quantized engine of torch within the block."""
    with _TURNS.released_read_lock(), _TURNS.packing, _TURNS.setting(engine):
        yield


def _begin_child() -> None:
    """Invariant 5."""
    backend: Any = torch.backends.quantized
    for before in _changed[:1]:
        backend.engine = before
    _changed.clear()
    _TURNS.begin_child()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_begin_child)
