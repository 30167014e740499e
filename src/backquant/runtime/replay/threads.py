"""Python functions on PyTorch's own threads.

``torch_parallel_for`` of PyTorch's stable C interface runs them on the threads that operators run on; within,
operators use the one thread that they are called on, as within an operator. So there is one pool of threads,
and never more of them than ``torch.get_num_threads()``.

Where a version of torch lacks that function, the calling thread does everything.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

Found = TypeVar("Found")

_NAME = "torch_parallel_for"
_RANGE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


def on_threads(work: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Call ``work`` with each item, on as many threads as torch uses; each takes the next item when it has
    done one. In a thread, operators use no further threads; no gradients are recorded, and inference mode is
    that of the caller.

    Raises the first error of ``work``; items that no thread had begun are left out then.

    >>> found = []
    >>> on_threads(found.append, range(4)); sorted(found)
    [0, 1, 2, 3]
    """
    each = _Work(work, iter(items))
    threads, parallel_for = torch.get_num_threads(), _parallel_for()
    if parallel_for is None or threads == 1:
        each.run()
    else:
        call = _RANGE(each.called)
        parallel_for(0, threads, 1, call, None)
    if each.problem is not None:
        raise each.problem


def alone(work: Callable[[], Found]) -> Found:
    """``work()``, in which the operators of this thread use no other thread, and ``torch.get_num_threads()``
    is one; other threads' do as before. Where there is no OpenMP, as always.

    ``torch.set_num_threads`` would change all threads, and its pools anew each time.

    >>> alone(torch.get_num_threads) <= torch.get_num_threads()
    True
    """
    parallel_for, set_threads, threads = _parallel_for(), _set_threads(), torch.get_num_threads()
    if parallel_for is None or set_threads is None or threads == 1:
        return work()
    made: list[Found] = []
    problems: list[BaseException] = []

    def called(begin: int, *_: object) -> None:
        if begin > 0:
            return  # another thread: it sleeps until the first is done
        set_threads(1)
        try:
            made.append(work())
        except BaseException as problem:
            problems.append(problem)
        finally:
            set_threads(threads)

    call = _RANGE(called)
    parallel_for(0, 2, 1, call, None)
    if problems:
        raise problems[0]
    return made[0]


class _Work:
    def __init__(self, work: Callable[[Any], None], items: Iterator[Any]) -> None:
        self.work, self.items = work, items
        self.problem: BaseException | None = None
        self.inference = torch.is_inference_mode_enabled()

    def run(self) -> None:
        with torch.inference_mode(self.inference), torch.no_grad():
            try:
                for item in self.items:
                    if self.problem is not None:
                        return
                    self.work(item)
            except BaseException as problem:
                self.problem = self.problem or problem

    def called(self, *_: object) -> None:
        """On one of the threads, whose numbers are given."""
        self.run()


@cache
def _parallel_for() -> Callable[..., int] | None:
    whole = ctypes.c_int64
    return _found(_NAME, ctypes.c_int32, (whole, whole, whole, _RANGE, ctypes.c_void_p))


@cache
def _set_threads() -> Callable[[int], None] | None:
    """OpenMP's, of the library that PyTorch's is linked to: it is for the calling thread."""
    return _found("omp_set_num_threads", None, (ctypes.c_int,))


def _found(name: str, returned: Any, arguments: tuple[Any, ...]) -> Callable[..., Any] | None:
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(path))[name]
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = arguments, returned
    return function
