"""Trials in processes of their own: one that dies or hangs costs its trial, and is replaced.

A worker is a fork of this process; it says before each call of the engine which case comes, so that its end
is put down to that case. After some trials it is replaced, which bounds the memory of a run.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from backquant.conformance.results import Outcome, Side, Trial, Verdict, trial_data

#: Trials that go side by side, and what may be sent about them: ``done`` with the position of one,
#: ``outcome`` with that and the outcome's data, ``at`` with the case that comes.
Group = tuple[Trial, ...]
Tell = Callable[[str, Any], None]
Job = Callable[[Group, Tell], None]
_TRIALS_OF_ONE = 200
_POLL = 0.2
_WATCH = 1.0


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    group: Group = ()
    found: dict[int, list[Outcome]] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    case: str = ""
    since: float = 0.0
    left: int = _TRIALS_OF_ONE


@dataclass(frozen=True)
class Pool:
    """``jobs`` workers that run ``job``, ``limit`` seconds for each case; ``engine``: its name.

    A worker that ends takes its trials with it: of several, each is tried again by itself.
    """

    job: Job
    engine: str
    jobs: int
    limit: float

    def run(self, groups: Iterable[Group], until: float) -> Iterator[tuple[Trial, Outcome | None]]:
        """The outcomes of each trial, then ``(trial, None)``. None begins after ``until``."""
        importlib.import_module("torch._dynamo")  # the first plan does; here all forks share it
        waiting = iter(groups)
        alone: deque[Group] = deque()
        workers: deque[_Worker] = deque()
        try:
            for _ in range(self.jobs):
                workers.append(self._started())
            while True:
                for worker in workers:
                    if not worker.group and time.monotonic() < until:
                        self._give(worker, alone.popleft() if alone else next(waiting, ()))
                busy = [worker for worker in workers if worker.group]
                if not busy:
                    return
                yield from self._heard(busy, workers, alone)
        finally:
            for worker in workers:
                _end(worker)

    def _heard(
        self, busy: list[_Worker], workers: deque[_Worker], alone: deque[Group]
    ) -> Iterator[tuple[Trial, Outcome | None]]:
        ready = wait([worker.pipe for worker in busy], timeout=_POLL)
        for worker in busy:
            why = ""
            if worker.pipe in ready:
                try:
                    yield from self._message(worker)
                except (EOFError, ConnectionResetError):
                    worker.process.join()
                    why = _end_text(worker.process.exitcode)
            elif time.monotonic() - worker.since > self.limit * len(worker.group):
                why = f"no answer within {self.limit:g} s"
            if why:
                yield from self._lost(worker, why, alone)
                self._replace(worker, workers)

    def _message(self, worker: _Worker) -> Iterator[tuple[Trial, Outcome | None]]:
        kind, content = worker.pipe.recv()
        worker.since = time.monotonic()
        if kind == "at":
            worker.case = content
        elif kind == "outcome":
            position, data = content
            worker.found.setdefault(position, []).append(Outcome.from_dict(data))
        elif kind == "done":
            trial = worker.group[content]
            yield from ((trial, outcome) for outcome in worker.found.pop(content, ()))
            worker.told.add(content)
            yield trial, None
        else:
            worker.group = ()

    def _lost(
        self, worker: _Worker, why: str, alone: deque[Group]
    ) -> Iterator[tuple[Trial, Outcome | None]]:
        """What becomes of the trials of a worker that has ended."""
        left = [trial for at, trial in enumerate(worker.group) if at not in worker.told]
        if len(worker.group) > 1:
            alone.extend((trial,) for trial in left)
            return
        for trial in left:
            yield from ((trial, outcome) for outcome in worker.found.get(0, ()))
            yield trial, self._ended(worker, trial, why)
            yield trial, None

    def _ended(self, worker: _Worker, trial: Trial, why: str) -> Outcome:
        claim = trial.claim
        blank = Outcome(
            worker.case or trial.key, claim.pattern, claim.dtypes, Side(trial.side), self.engine,
            Verdict.REFUSED_BY_ENGINE, trial=trial_data(trial),
        )  # fmt: skip
        return replace(blank, detail=why)

    def _replace(self, worker: _Worker, workers: deque[_Worker]) -> None:
        _end(worker)
        workers.remove(worker)
        workers.append(self._started())

    def _started(self) -> _Worker:
        way = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
        context = multiprocessing.get_context(way)
        ours, theirs = context.Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # of forks beside threads, which idle
            process = context.Process(target=_work, args=(ours, theirs, self.job), daemon=True)  # type: ignore[attr-defined]
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def _give(self, worker: _Worker, group: Group) -> None:
        if not group:
            return
        if worker.left <= 0:
            _end(worker)
            fresh = self._started()
            worker.process, worker.pipe, worker.left = fresh.process, fresh.pipe, fresh.left
        worker.group, worker.found, worker.told, worker.case = group, {}, set(), ""
        worker.since = time.monotonic()
        worker.left -= len(group)
        worker.pipe.send(group)


def _end_text(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with status {code}"


def _end(worker: _Worker) -> None:
    worker.pipe.close()
    if worker.process.is_alive():
        worker.process.kill()
    worker.process.join()


def _end_with_parent(ours: Connection) -> None:
    """Let this process end as soon as the one that started it has ended, in the middle of a case, too."""
    ours.close()  # the copy that the fork made of the other end
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(ours: Connection, pipe: Connection, job: Job) -> None:
    """In the worker: one group after the other, on one thread, in silence."""
    import torch

    _end_with_parent(ours)

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)

    def tell(kind: str, content: Any) -> None:
        pipe.send((kind, content))

    while True:
        try:
            group = pipe.recv()
        except (EOFError, OSError):
            return
        job(group, tell)
        tell("free", None)
