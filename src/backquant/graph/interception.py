"""Whether somebody follows the operators that are called: a dispatch or function mode, a trace, a compiler,
a transform of ``torch.func``.

What asks torch for that is private to it and stands here alone. Where a version of torch lacks one of these
functions, every call counts as followed: it runs operator by operator, without recordings.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.fx import _symbolic_trace
from torch.nn.modules import module as hooks
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

# Dispatch modes that PyTorch's compiler costs nothing, and that do it no harm.
#
# 1. ``TorchDispatchMode`` keeps the compiler out of ``__torch_dispatch__`` by a wrapper that imports it
#    (Dynamo, sympy: 65 MiB and more than a second) with the first operator. Where nothing has imported it by
#    then, there is nothing to keep out.
# 2. Under a mode the compiler by default compiles nothing, and remembers for the rest of the process that it
#    does not compile that code. ``torch.cond``, ``flex_attention`` and their like, compiled whenever they are
#    called, would fail ever after, under no mode, too. So these modes are off while something is compiled,
# and    on again while it runs; ``torch.cond`` and its like come to them as one operator.


class DispatchMode(TorchDispatchMode):
    """``TorchDispatchMode``, which imports no compiler and lets it compile.

    ``func`` of ``__torch_dispatch__`` may be a ``HigherOrderOperator``, which has no schema.

    >>> class Names(DispatchMode):
    ...     def __torch_dispatch__(self, func, types, args=(), kwargs=None):
    ...         print(func)
    ...         return func(*args, **(kwargs or {}))
    >>> import torch
    >>> with Names():
    ...     _ = torch.relu(torch.ones(1))
    aten.ones.default
    aten.relu.default
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether the compiler may compile while this mode is on: case 2 of the module."""
        return True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        plain = vars(cls).get("__torch_dispatch__")
        super().__init_subclass__(**kwargs)  # puts PyTorch's wrapper around it
        if plain is not None:
            wrapped = vars(cls)["__torch_dispatch__"]
            cls.__torch_dispatch__ = _either(plain, wrapped)  # type: ignore[method-assign]


def _either(plain: Callable[..., Any], wrapped: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        chosen = wrapped if "torch._dynamo" in sys.modules else plain
        return chosen(*args, **kwargs)

    return dispatch


# Whose code a frame runs: PyTorch's, backquant's, or the user's.


def folder(path: Path) -> str:
    """A path with a separator at the end: that of ``torchvision`` begins with that of ``torch``, too."""
    return f"{path}{os.sep}"


_LIBRARIES = (folder(Path(torch.__file__).parent), folder(Path(__file__).parents[1]))


def user_line(error: BaseException) -> str:
    """``file:line: source`` of the last frame outside PyTorch and backquant; ``""`` if none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def frame_line(frame: FrameType | None) -> str:
    """``file:line: source`` of the innermost call outside PyTorch and backquant; ``""`` if none."""
    while frame is not None:
        path = frame.f_code.co_filename
        if is_users(path):
            source = linecache.getline(path, frame.f_lineno).strip()
            return f"{path}:{frame.f_lineno}: {source}"
        frame = frame.f_back
    return ""


def is_users(path: str) -> bool:
    """Whether a file of code is neither PyTorch's nor backquant's.

    >>> is_users(torch.__file__), is_users("/home/me/model.py")
    (False, True)
    """
    return not path.startswith((*_LIBRARIES, "<"))


# A function (per thread) since torch 2.14, a global variable before.
_FX_TRACE = (
    "_get_is_fx_tracing"
    if hasattr(_symbolic_trace, "_get_is_fx_tracing")
    else "_is_fx_tracing_flag"
)
_NEEDED: tuple[tuple[Any, str], ...] = (
    (torch._C, "_len_torch_dispatch_stack"),
    (torch._C, "_len_torch_function_stack"),
    (torch._C, "_get_tracing_state"),
    (torch._C, "_is_any_autocast_enabled"),
    (torch._C._functorch, "peek_interpreter_stack"),
    (dispatch, "_get_current_dispatch_mode_stack"),
    (hooks, "_has_any_global_hook"),
    (_symbolic_trace, _FX_TRACE),
)

#: The names above that this version of torch lacks; empty: none.
missing = ", ".join(f"{home.__name__}.{name}" for home, name in _NEEDED if not hasattr(home, name))


def _asked(home: Any, name: str) -> Callable[[], Any]:
    # ``bool`` (False) where torch lacks it: then ``missing`` decides
    found: Callable[[], Any] = getattr(home, name, bool)
    return found


# Looked up at import: they are called in every call of a quantized model.
_dispatch_modes = _asked(torch._C, "_len_torch_dispatch_stack")
_function_modes = _asked(torch._C, "_len_torch_function_stack")
_trace = _asked(torch._C, "_get_tracing_state")
_transform = _asked(torch._C._functorch, "peek_interpreter_stack")
_global_hook = _asked(hooks, "_has_any_global_hook")
_has_autocast = _asked(torch._C, "_is_any_autocast_enabled")
_is_compiling = torch.compiler.is_compiling
_fx_trace: Callable[[], Any] = (
    _asked(_symbolic_trace, _FX_TRACE)
    if _FX_TRACE.startswith("_get")
    else partial(vars(_symbolic_trace).get, _FX_TRACE)
)


def is_exporting() -> bool:
    """``torch.compiler.is_exporting()`` as TorchDynamo can read it: that knows functions by their identity,
    and not this one where its table was made while a capture had replaced it.

    >>> is_exporting()
    False
    """
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def dispatch_modes() -> int:
    """How many dispatch modes see each operator.

    >>> dispatch_modes()
    0
    """
    return 1 if missing else int(_dispatch_modes())


def is_watched() -> bool:
    """Whether something wants to see the operators, or gives them another meaning.

    >>> with torch.autocast("cpu"):
    ...     is_watched()
    True
    >>> is_watched()
    False
    """
    # torch.compile evaluates this while compiling, and can do so only for _is_compiling
    return bool(
        missing
        or _is_compiling()
        or _dispatch_modes()
        or _function_modes()
        or _trace()
        or _transform() is not None
        or _has_autocast()
        or _fx_trace()
        or _global_hook()
    )


def stand_ins() -> str:
    """What gives operators other tensors than those with the data: a fake mode, a trace, a transform. Empty:
    nothing.

    >>> stand_ins()
    ''
    >>> torch.func.vmap(lambda x: print(stand_ins()) or x)(torch.ones(1))
    torch.func
    tensor([1.])
    """
    if missing:
        return ""
    if _dispatch_modes():
        for mode in dispatch._get_current_dispatch_mode_stack():
            if (
                getattr(mode, "_mode_key", None) is not None
            ):  # modes of torch itself: fake tensors, proxies, functionalization
                return type(mode).__name__
    if _transform() is not None:
        return "torch.func"
    return "torch.jit.trace" if _trace() else ""


# Which operators draw random numbers, and who calls them.
#
# An operator that may draw is asked whether it has: it has moved a generator. Attention draws only with
# dropout, dropout only in training mode.
class Draws(DispatchMode):
    """While it is open, notes in ``found`` each operator that draws, with the line outside PyTorch that calls
    it (empty where there is none).

    >>> with Draws() as draws:
    ...     _ = torch.rand(2) + torch.nn.functional.dropout(torch.ones(2), 0.5, training=False)
    >>> list(draws.found)
    ['aten.rand.default']
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        generator = kwargs.get("generator") or torch.default_generator
        before = generator.get_state()
        result = func(*args, **kwargs)
        if generator.device.type != "cpu" or not torch.equal(before, generator.get_state()):
            self.found.setdefault(str(func), frame_line(sys._getframe(1)))
        return result
