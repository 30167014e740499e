"""Modules of torch that ask whether their arguments override torch's functions, while a call is recorded.

``nn.MultiheadAttention`` and the transformer layers compute all as one operator, unless an argument overrides
torch's functions; ``torch.overrides.has_torch_function`` says that of any argument below a function mode, as
that of a recording is. They would record other operators than they run, of which the last bits differ.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_PLAIN = (torch.Tensor, nn.Parameter, type(None))
_original = torch.overrides.has_torch_function
_recording: set[int] = set()  # ids of threads that are recording
_lock = threading.Lock()


@contextmanager
def as_without_modes() -> Iterator[None]:
    """In this thread plain tensors override no function, whatever modes are on; other threads see no
    change.

    >>> class Mode(torch.overrides.TorchFunctionMode):
    ...     def __torch_function__(self, func, types, args=(), kwargs=None):
    ...         return func(*args, **(kwargs or {}))
    >>> with Mode():
    ...     before = torch.overrides.has_torch_function((torch.ones(1),))
    ...     with as_without_modes():
    ...         before, torch.overrides.has_torch_function((torch.ones(1),))
    (True, False)
    """
    here = threading.get_ident()
    if here in _recording:
        yield
        return
    with _lock:
        _recording.add(here)
        torch.overrides.has_torch_function = _answer
    try:
        yield
    finally:
        with _lock:
            _recording.remove(here)
            if not _recording:
                torch.overrides.has_torch_function = _original


def _answer(args: Iterable[Any]) -> bool:
    given = tuple(args)
    if threading.get_ident() in _recording and all(type(each) in _PLAIN for each in given):
        return False
    return bool(_original(given))
