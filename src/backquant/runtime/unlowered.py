"""Models of which nothing is lowered, and which call little: they run as they would without backquant.

To look at what a call is given, and to find its recording, costs more there than it saves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from backquant.graph.watched import is_watched
from backquant.runtime.faced import Faced
from backquant.runtime.failed_kernel import raise_told
from backquant.runtime.record import LoweredRecord

_FEW = 4  # up to so many calls, interpreting takes less time than looking up a recording


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


def called_alone(graph_module: GraphModule) -> str:
    """The one module that ``graph_module`` calls, if it does nothing else: with its own arguments, as they
    come. Empty: there is none.

    >>> from backquant.graph.capture import called_whole
    >>> called_alone(called_whole(torch.nn.GRUCell(2, 2)))
    'grucell'
    >>> called_alone(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU())))
    ''
    """
    if len(graph_module.graph.nodes) < 2:
        return ""
    *inputs, call, output = graph_module.graph.nodes
    name = str(call.target)
    if (
        call.op != "call_module"
        or call.args != tuple(inputs)
        or call.kwargs
        or output.args != (call,)
    ):
        return ""
    module = graph_module._modules.get(name)
    if module is None or isinstance(module, GraphModule):
        return ""
    taken = inspect.signature(module.forward).parameters.values()
    given = [
        (node.target, node.args[0] if node.args else inspect.Parameter.empty) for node in inputs
    ]
    plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in taken)
    return name if plain and [(p.name, p.default) for p in taken] == given else ""


def without_gradients(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``run(*args, **kwargs)`` under ``torch.no_grad()``, which takes time where there are none anyway.

    >>> without_gradients(torch.is_grad_enabled, (), {})
    False
    """
    with torch.no_grad():
        return run(*args, **kwargs)


class PlainlyCalled(Faced):
    """A module with a ``graph_module``, which runs without what modules, and checks, put around it where it
    is plain and nobody looks.

    >>> model = PlainlyCalled(torch.nn.Module(), torch.fx.Graph())
    >>> model._begin_face(torch.fx.symbolic_trace(torch.nn.ReLU()))
    >>> model._begin_plainly(True)
    >>> model(torch.tensor([-1.0]))
    tensor([0.])
    """

    record: LoweredRecord
    source: str
    _is_plain = False
    _alone = ""

    def _begin_plainly(self, is_plain: bool) -> None:
        self._is_plain = is_plain
        self._alone = called_alone(self.graph_module) if is_plain else ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What ``forward`` gives. Raises what it raises."""
        # The fast path has few steps: a recurrent cell takes 25 µs in all.
        if not self._is_plain or is_watched() or self._forward_hooks or self._forward_pre_hooks:
            return super().__call__(*args, **kwargs)
        if not self._is_unchanged():
            return super().__call__(*args, **kwargs)
        run: Any = self.graph_module
        if not run._forward_hooks and not run._forward_pre_hooks:
            called = run._modules[self._alone] if self._alone else run
            if called._forward_hooks or called._forward_pre_hooks:
                called = run
            run = called.forward
        try:
            if torch.is_grad_enabled():
                return without_gradients(run, args, kwargs)
            return run(*args, **kwargs)
        except Exception as error:
            raise_told(self, error, (args, kwargs))
