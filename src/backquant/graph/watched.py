"""Whether somebody follows the operators that are called: a dispatch or function mode, a trace, a compiler,
a transform of ``torch.func``.

What asks torch for that is private to it and stands here alone. Where a version of torch lacks one of these
functions, every call counts as followed: it runs operator by operator, without recordings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as hooks
from torch.utils import _python_dispatch as dispatch

_NEEDED: tuple[tuple[Any, str], ...] = (
    (torch._C, "_len_torch_dispatch_stack"),
    (torch._C, "_len_torch_function_stack"),
    (torch._C, "_get_tracing_state"),
    (torch._C._functorch, "peek_interpreter_stack"),
    (dispatch, "_get_current_dispatch_mode_stack"),
    (hooks, "_has_any_global_hook"),
)
#: What this version of torch lacks of them; empty: nothing.
missing = ", ".join(f"{home.__name__}.{name}" for home, name in _NEEDED if not hasattr(home, name))


def dispatch_modes() -> int:
    """How many dispatch modes see each operator.

    >>> dispatch_modes()
    0
    """
    return 1 if missing else int(torch._C._len_torch_dispatch_stack())


def is_watched() -> bool:
    """Whether something wants to see the operators, or gives them another meaning.

    >>> is_watched()
    False
    """
    return bool(
        missing
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.is_autocast_enabled("cpu")
        or hooks._has_any_global_hook()
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
    if torch._C._len_torch_dispatch_stack():
        for mode in dispatch._get_current_dispatch_mode_stack():
            if (
                getattr(mode, "_mode_key", None) is not None
            ):  # of torch itself: fake, proxy, functional
                return type(mode).__name__
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func"
    return "torch.jit.trace" if torch._C._get_tracing_state() else ""
