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


class _Capture:
    """The thread that captures, until it ends, and what is replaced for it."""

    def __init__(self) -> None:
        self.thread: int | None = threading.get_ident()
        self.replaced = ExitStack()

    def is_here(self) -> bool:
        return self.thread == threading.get_ident()


_current: list[_Capture] = []  # the capture in progress: at most one


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
        capture = _Capture()
        _current.append(capture)
        try:
            with capture.replaced as replaced:
                replaced.enter_context(_own_patcher(capture))
                replaced.enter_context(_own_moves(capture))
                for module, name in product(filter(None, map(sys.modules.get, _ASKED)), _FLAGS):
                    replaced.enter_context(_own_flag(capture, module, name))
                yield
        finally:
            capture.thread = None
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
def _own_patcher(capture: _Capture) -> Iterator[None]:
    base: Any = getattr(_symbolic_trace, "_Patcher", None)
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
                new_fn = _for(capture, new_fn, before)
            super().patch(frame_dict, name, new_fn, deduplicate)

        def patch_method(self, cls: type, name: str, new_fn: Any, deduplicate: bool = True) -> None:
            new_fn = _for(capture, new_fn, getattr(cls, name))
            super().patch_method(cls, name, new_fn, deduplicate)

    _symbolic_trace._Patcher = OwnPatcher  # type: ignore[misc]
    try:
        yield
    finally:
        _symbolic_trace._Patcher = base  # type: ignore[misc]


@contextmanager
def _own_moves(capture: _Capture) -> Iterator[None]:
    """To this thread ``module.to(...)`` gives the module where its tensors are so already. A model that makes
    sure of the dtype of a layer in ``forward`` fails in an export otherwise: torch gives each parameter
    anew, and cannot do that to one that an export stands in for."""
    original = nn.Module.to

    @functools.wraps(original)
    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if capture.is_here() and _is_there(module, torch._C._nn._parse_to(*args, **kwargs)):
            return module
        return original(module, *args, **kwargs)

    nn.Module.to = to  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.to = original  # type: ignore[method-assign]


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


def _for(
    capture: _Capture, replacement: Callable[..., Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """``replacement`` to the thread that captures, ``original`` to all others."""

    @functools.wraps(replacement)
    def called(*args: Any, **kwargs: Any) -> Any:
        function = replacement if capture.is_here() else original
        return function(*args, **kwargs)

    return called


@contextmanager
def _own_flag(capture: _Capture, module: Any, name: str) -> Iterator[None]:
    """``module.is_…`` as it is to this thread, false to all others."""

    def answer(original: Callable[[], bool]) -> bool:
        return capture.is_here() and original()

    with _answering(module, name, answer):
        yield


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
    capture = _Capture()

    def answer(original: Callable[[], bool]) -> bool:
        return not capture.is_here() and original()

    with _turn.lock, _answering(torch.backends.mha, "get_fastpath_enabled", answer):
        yield


@contextmanager
def untold_of_capture(*_: object) -> Iterator[None]:
    """In this thread models that ask whether they are exported or compiled hear that they are not.

    >>> with untold_of_capture(), torch._export.utils._compiling_state_context():
    ...     torch.compiler.is_exporting()
    False
    """
    capture = _Capture()

    def answer(original: Callable[[], bool]) -> bool:
        return not capture.is_here() and original()

    with _turn.lock, ExitStack() as replaced:
        for name in ("is_compiling", "is_exporting"):
            replaced.enter_context(_answering(torch.compiler, name, answer))
        yield


@contextmanager
def _answering(
    module: Any, name: str, answer: Callable[[Callable[[], bool]], bool]
) -> Iterator[None]:
    """``module.name()`` is ``answer`` of what it was; unchanged where the module has no such function."""
    original: Callable[[], bool] | None = getattr(module, name, None)
    if original is None:
        yield
        return

    @functools.wraps(original)
    def answered() -> bool:
        return answer(original)

    setattr(module, name, answered)
    try:
        yield
    finally:
        setattr(module, name, original)


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
    for capture in _current:
        capture.thread = None
        capture.replaced.close()
    _current.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_begin_child)
