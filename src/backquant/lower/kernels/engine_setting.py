"""torch's quantized engine, a setting of the whole process that packing reads – and some kernels, too.

Weights are packed for the engine that is set. While it is qnnpack, some of torch's ``quantized::`` kernels on
uint8 are qnnpack's, and round otherwise than the rest (hard-swish, by one step). So a model that runs and a
weight that is packed for qnnpack keep out of each other's way.

Invariants

1. The setting is changed by one thread at a time, and put back.
2. While it is changed to or from qnnpack, no lowered model runs in any thread.
3. A model that packs weights in its first call gives up its turn for the packing, so that two such models do
   not wait for each other.
4. In a process that was forked only the thread that forked runs or packs; the setting is what it was.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_OTHER_ROUNDING = "qnnpack"


class _Turns:
    """Many may run, or one may change the setting."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._running = 0
        self.packing = threading.RLock()
        self._own = threading.local()

    def _depth(self) -> int:
        return int(getattr(self._own, "depth", 0))

    def enter(self) -> None:
        depth = self._depth()
        if depth == 0:
            with self._change:
                self._running += 1
        self._own.depth = depth + 1

    def leave(self) -> None:
        self._own.depth = self._depth() - 1
        if self._own.depth == 0:
            with self._change:
                self._running -= 1
                if self._running == 0:
                    self._change.notify_all()

    def begin_child(self) -> None:
        """Forget other threads: after a fork only the one that forked is left."""
        self._change = threading.Condition()
        self.packing = threading.RLock()
        self._running = int(self._depth() > 0)

    @contextmanager
    def given_up(self) -> Iterator[None]:
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
    def alone(self) -> Iterator[None]:
        """While nobody runs; whoever begins to waits."""
        with self._change:
            self._change.wait_for(lambda: self._running == 0)
            yield


_TURNS = _Turns()
_changed: list[str] = []  # the engine that was set before, to be set again


class _Running:
    def __enter__(self) -> None:
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
    with _TURNS.given_up(), _TURNS.packing:
        before = str(torch.backends.quantized.engine)
        if engine == before:
            yield
        elif _OTHER_ROUNDING in (engine, before):
            with _TURNS.alone(), _set(engine, before):
                yield
        else:
            with _set(engine, before):
                yield


@contextmanager
def _set(engine: str, before: str) -> Iterator[None]:
    backend: Any = torch.backends.quantized
    _changed.append(before)
    backend.engine = engine
    try:
        yield
    finally:
        backend.engine = before
        _changed.pop()


def _begin_child() -> None:
    """Invariant 4."""
    _TURNS.begin_child()
    backend: Any = torch.backends.quantized
    for before in _changed[:1]:
        backend.engine = before
    _changed.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_begin_child)
