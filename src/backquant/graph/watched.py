"""Whether somebody follows the operators that are called: a dispatch or function mode, a trace, a compiler.

What asks torch for that is private to it and stands here alone. Where a version of torch lacks one of these
functions, every call counts as followed: it runs operator by operator, without recordings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as hooks

_NEEDED: tuple[tuple[Any, str], ...] = (
    (torch._C, "_len_torch_dispatch_stack"),
    (torch._C, "_len_torch_function_stack"),
    (torch._C, "_get_tracing_state"),
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
        or torch.is_autocast_enabled("cpu")
        or hooks._has_any_global_hook()
    )
