"""Building graphs without the cyclic garbage collector."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import fx

__all__ = ["released", "without_collector"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def without_collector(function: _Function) -> _Function:
    """``function``, which runs while automatic garbage collection pauses.

    Steps that make ten thousand nodes, which all stay, start the collector again and again; each
    time it looks at all that was made before. That was half of their time. What is garbage meanwhile
    goes at the next collection after the step.

    >>> without_collector(gc.isenabled)(), gc.isenabled()
    (False, True)
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if was_enabled:
                gc.enable()

    return cast("_Function", run)


def released(module: fx.GraphModule) -> None:
    """Let the modules of a graph module that is about to be dropped go with it.

    A graph refers to its module, and the module to the graph: the collector has to find that nobody
    else does, among all that was made meanwhile. Without the one reference, ``module`` works as before.

    >>> import weakref
    >>> module = fx.symbolic_trace(lambda x: x)
    >>> watched = weakref.ref(module)
    >>> released(module)
    >>> del module
    >>> watched() is None
    True
    """
    module._graph.owning_module = None
