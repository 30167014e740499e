"""How a test judges a converted model: by what it computes, and by its graph.

One run gives both: what does not fit in the graph of a lowered model is noted and the test goes on. Prepared,
fused and reference models are judged by their graphs in any case.
"""

from __future__ import annotations

from typing import Any

from torch_own.graphs import is_lowered, same_words

__all__ = ["NOTED", "install"]

#: What did not fit in the graphs of lowered models, in the test that runs.
NOTED: list[str] = []


def install(case: Any) -> None:
    """Give the base class ``case`` a look at graphs that knows lowered models."""
    checked = case.checkGraphModuleNodes

    def check(self: Any, graph_module: Any, *args: Any, **kwargs: Any) -> None:
        if not is_lowered(graph_module):
            checked(self, graph_module, *args, **kwargs)
            return
        try:
            same_words(self, graph_module, *args, **kwargs)
        except AssertionError as error:
            NOTED.append(str(error))

    case.checkGraphModuleNodes = check
