"""Whether somebody follows the operators that are called: a dispatch or function mode, a trace, a compiler,
a transform of ``torch.func``.

What asks torch for that is private to it and stands here alone. Where a version of torch lacks one of these
functions, every call counts as followed: it runs operator by operator, without recordings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import _symbolic_trace
from torch.nn.modules import module as hooks
from torch.utils import _python_dispatch as dispatch

from backquant.graph.dispatch_mode import DispatchMode
from backquant.graph.user_code import frame_line

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
