"""The contract of a graph pass: requires, run, ensures, and the graph verifies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from backquant.errors import BackquantError, PassError
from backquant.graph.verify import verify

__all__ = ["GraphPass", "run_passes"]

#: Returns what is wrong, or an empty string.
Check = Callable[[fx.GraphModule], str]


def _nothing(_: fx.GraphModule) -> str:
    return ""


@dataclass(frozen=True)
class GraphPass:
    """A named step from graph module to graph module.

    ``requires`` and ``ensures`` look at the graph before and after and return what is wrong.
    Errors about what the user asked (``BackquantError``) pass through; all else is a defect of
    the pass and becomes a ``PassError`` with its name.

    >>> step = GraphPass("tidy", lambda gm: gm)
    >>> step(fx.symbolic_trace(lambda x: x + 1)).graph.nodes.__len__()
    3
    """

    name: str
    run: Callable[[fx.GraphModule], fx.GraphModule]
    requires: Check = _nothing
    ensures: Check = _nothing

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        self._check(self.requires, module, "requires")
        try:
            result = self.run(module)
        except BackquantError:
            raise
        except Exception as error:
            raise PassError(
                f"{type(error).__name__}: {error}", where=f"pass {self.name!r}"
            ) from error
        self._check(self.ensures, result, "ensures")
        verify(result, after=f"pass {self.name!r}")
        return result

    def _check(self, check: Check, module: fx.GraphModule, which: str) -> None:
        complaint = check(module)
        if complaint:
            raise PassError(complaint, where=f"pass {self.name!r}, {which}")


def run_passes(module: fx.GraphModule, passes: Iterable[GraphPass]) -> fx.GraphModule:
    """Run passes in order, each with its checks.

    >>> run_passes(fx.symbolic_trace(lambda x: x + 1), []).graph.nodes.__len__()
    3
    """
    for step in passes:
        module = step(module)
    return module
