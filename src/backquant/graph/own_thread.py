"""Captures and exports that other threads do not notice.

While torch traces a model it replaces functions of the whole process: ``nn.Module.__call__`` and
``__getattr__``, functions that are wrapped for tracing, the flags behind ``torch.compiler.is_compiling``
and ``is_exporting``; here ``nn.Module.to`` is replaced as well. A model that another thread runs meanwhile
would be traced, too, or take another way. Within ``capture_in_own_thread`` each of these replacements
answers the thread that captures, and all others get what was there before.

Invariants

1. One capture at a time: a second thread waits. Captures within a capture belong to it.
2. When the last capture ends, everything is as it was; a replacement that somebody kept acts as the original.
3. Where a torch version has no such function, nothing is replaced.
4. In a process that was forked no other thread captures.

Source: ``torch.fx._symbolic_trace._Patcher``, ``torch._export.utils._compiling_state_context``.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.fx import _symbolic_trace

_turn = SimpleNamespace(lock=threading.RLock())
_FLAGS = ("is_compiling", "is_exporting", "is_fx_tracing", "is_fx_symbolic_tracing")
# Modules that define these functions or import them by name.
_ASKED = (
    "torch.compiler",
    "torch.fx._symbolic_trace",
    "torch.export.unflatten",
    "torch._dynamo.eval_frame",
)


class _Thread:
    """The thread that it is made in, until it ends, and what is replaced for it."""

    def __init__(self) -> None:
        self.number: int | None = threading.get_ident()
        self.replaced = ExitStack()

    def is_here(self) -> bool:
        return self.number == threading.get_ident()

    def choosing(
        self, here: Callable[..., Any], elsewhere: Callable[..., Any]
    ) -> Callable[..., Any]:
        """``here`` to this thread, ``elsewhere`` to all others."""

        @functools.wraps(here)
        def called(*args: Any, **kwargs: Any) -> Any:
            function = here if self.is_here() else elsewhere
            return function(*args, **kwargs)

        return called


_current: list[_Thread] = []  # that of the capture in progress: at most one


@contextmanager
def replaced(
    owner: Any,
    name: str,
    here: Callable[..., Any] | None = None,
    elsewhere: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """While it is open, ``owner.name`` is ``here`` to this thread and ``elsewhere`` to all others, by default
    what it was. Nothing changes where ``owner`` has no such function.

    >>> with replaced(sys, "getrecursionlimit", here=lambda: 7):
    ...     sys.getrecursionlimit()
    7
    """
    original = getattr(owner, name, None)
    if original is None:
        yield
        return
    thread = _Thread()
    chosen = thread.choosing(here or original, elsewhere or original)
    setattr(owner, name, functools.wraps(original)(chosen))
    try:
        yield
    finally:
        thread.number = None
        setattr(owner, name, original)


def _no() -> bool:
    return False


@contextmanager
def capture_in_own_thread() -> Iterator[None]:
    """Whatever torch replaces within the block, it replaces for this thread alone.

    >>> with capture_in_own_thread():
    ...     graph = torch.fx.symbolic_trace(torch.nn.ReLU()).graph
    >>> [node.op for node in graph.nodes]
    ['placeholder', 'call_function', 'output']
    """
    with _turn.lock:
        if _current:
            yield
            return
        thread = _Thread()
        _current.append(thread)
        try:
            with thread.replaced as open_now:
                open_now.enter_context(_own_patcher(thread))
                open_now.enter_context(replaced(nn.Module, "to", here=_to(nn.Module.to)))
                for module, name in product(filter(None, map(sys.modules.get, _ASKED)), _FLAGS):
                    open_now.enter_context(replaced(module, name, elsewhere=_no))
                yield
        finally:
            thread.number = None
            _current.clear()


@contextmanager
def in_turn() -> Iterator[None]:
    """Invariant 1 for a block that replaces something by itself.

    >>> with in_turn(), capture_in_own_thread():
    ...     graph = torch.fx.symbolic_trace(torch.nn.ReLU()).graph
    """
    with _turn.lock:
        yield


@contextmanager
def _own_patcher(thread: _Thread) -> Iterator[None]:
    tracing: Any = _symbolic_trace
    base: Any = getattr(tracing, "_Patcher", None)
    if base is None:
        yield
        return

    class OwnPatcher(base):
        """torch's, with replacements that ask which thread calls."""

        def patch(
            self, frame_dict: dict[str, Any], name: str, new_fn: Any, deduplicate: bool = True
        ) -> None:
            before = frame_dict.get(name)
            if before is not None:
                new_fn = thread.choosing(new_fn, before)
            super().patch(frame_dict, name, new_fn, deduplicate)

        def patch_method(self, cls: type, name: str, new_fn: Any, deduplicate: bool = True) -> None:
            new_fn = thread.choosing(new_fn, getattr(cls, name))
            super().patch_method(cls, name, new_fn, deduplicate)

    tracing._Patcher = OwnPatcher
    try:
        yield
    finally:
        tracing._Patcher = base


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Module.to``, which gives the module where its tensors are so already. A model that makes sure of the
    dtype of a layer in ``forward`` fails in an export otherwise: torch gives each parameter anew, and cannot
    do that to one that an export stands in for."""

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _is_there(module, torch._C._nn._parse_to(*args, **kwargs)):
            return module
        return original(module, *args, **kwargs)

    return to


def _is_there(module: nn.Module, asked: tuple[Any, ...]) -> bool:
    """Whether the tensors of ``module`` have the device and the dtype that ``Module.to`` is asked for."""
    device, dtype, _, memory_format = asked
    if memory_format is not None:
        return False
    tensors = (*module.parameters(), *module.buffers())
    return all(
        (device is None or tensor.device == device)
        and (dtype is None or tensor.dtype == dtype or not tensor.dtype.is_floating_point)
        for tensor in tensors
    )


@contextmanager
def without_attention_fastpath() -> Iterator[None]:
    """In this thread ``torch.backends.mha`` reports no kernels that compute an attention as one
    operator.

    >>> with without_attention_fastpath():
    ...     torch.backends.mha.get_fastpath_enabled()
    False
    >>> torch.backends.mha.get_fastpath_enabled()
    True
    """
    with _turn.lock, replaced(torch.backends.mha, "get_fastpath_enabled", here=_no):
        yield


@contextmanager
def untold_of_capture(*_: object) -> Iterator[None]:
    """In this thread models that ask whether they are exported or compiled hear that they are not.

    >>> with untold_of_capture(), torch._export.utils._compiling_state_context():
    ...     torch.compiler.is_exporting()
    False
    """
    compiler = torch.compiler
    with (
        _turn.lock,
        replaced(compiler, "is_compiling", here=_no),
        replaced(compiler, "is_exporting", here=_no),
    ):
        yield


class _OwnStream:
    """A stream that drops what one thread writes; all others write to the stream that was there."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return len(text)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def printing_nowhere() -> Iterator[None]:
    """What this thread prints is dropped; what others print is not.

    >>> with printing_nowhere():
    ...     print("traced until it failed")
    """
    with _turn.lock:
        out, err = sys.stdout, sys.stderr
        with redirect_stdout(_OwnStream(out)), redirect_stderr(_OwnStream(err)):
            yield


def _begin_child() -> None:
    """Invariant 4."""
    if _current and _current[0].is_here():
        return
    _turn.lock = threading.RLock()
    for thread in _current:
        thread.number = None
        thread.replaced.close()
    _current.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_begin_child)
