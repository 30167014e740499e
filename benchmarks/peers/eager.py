"""The float model as PyTorch runs it."""

from __future__ import annotations

from benchmarks.peers import Prepared, Task

__all__ = ["prepare"]


def prepare(task: Task) -> Prepared:
    return Prepared(lambda x: x, lambda x: task.model(*x), lambda y: y.numpy())
