"""How a test judges a converted model: by what it computes, or by its graph, too.

Prepared, fused and reference models are judged by their graphs in both.
"""

from __future__ import annotations

import os
from typing import Any

from torch_own.graphs import is_lowered, same_words

__all__ = ["JUDGE", "install"]

#: ``outputs`` or ``graph``, as ``tools/torch_own_tests.py`` was asked.
JUDGE = os.environ.get("TORCH_OWN_JUDGE", "graph")


def install(case: Any) -> None:
    """Give the base class ``case`` a look at graphs that knows lowered models."""
    checked = case.checkGraphModuleNodes

    def check(self: Any, graph_module: Any, *args: Any, **kwargs: Any) -> None:
        if not is_lowered(graph_module):
            checked(self, graph_module, *args, **kwargs)
        elif JUDGE == "graph":
            same_words(self, graph_module, *args, **kwargs)

    case.checkGraphModuleNodes = check
