"""Models of which nothing is lowered, and which call little: they run as they would without backquant.

To look at what a call is given, and to find its recording, costs more there than it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule

from backquant.graph.watched import is_watched
from backquant.runtime.interpreted import Interpreted
from backquant.runtime.record import LoweredRecord

_FEW = 4  # calls: Python between them takes less time than what finds a recording


def calls_little(graph_module: GraphModule, record: LoweredRecord) -> bool:
    """Whether ``graph_module`` is float alone, traced, and of few calls.

    >>> from backquant import BackendConfig, QConfigMapping
    >>> from backquant.match import Plan
    >>> record = LoweredRecord(Plan("x86"), BackendConfig("x86"), QConfigMapping())
    >>> calls_little(torch.fx.symbolic_trace(torch.nn.ReLU()), record)  # a reference model
    False
    """
    if record.engine is None or record.kernels or record.interface or record.inputs:
        return False
    calls = [node for node in graph_module.graph.nodes if node.op.startswith("call_")]
    return len(calls) <= _FEW


def run_plainly(held: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``held["graph_module"]`` gives, without a check where nobody looks. ``held``: the modules of a
    module, since ``__getattr__`` takes as long as all else here.

    >>> run_plainly({"graph_module": torch.fx.symbolic_trace(torch.nn.ReLU())}, (torch.tensor([-1.0]),), {})
    tensor([0.])
    """
    graph_module = held["graph_module"]
    if is_watched():
        return Interpreted(graph_module)(*args, **kwargs)
    if graph_module._forward_hooks or graph_module._forward_pre_hooks:
        return graph_module(*args, **kwargs)
    return graph_module.forward(*args, **kwargs)


def without_gradients(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``run(args, kwargs)`` under ``torch.no_grad()``, which takes time where there are none anyway.

    >>> without_gradients(lambda args, kwargs: torch.is_grad_enabled(), (), {})
    False
    """
    with torch.no_grad():
        return run(args, kwargs)
