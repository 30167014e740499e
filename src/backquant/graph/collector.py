"""Graphs that go without the cyclic garbage collector."""

from __future__ import annotations

from torch import fx


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
