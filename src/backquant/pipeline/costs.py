"""Multiply-adds of each operator, counted in one run of the captured graph; the run also shows that it
works."""

from __future__ import annotations

import re
from typing import Any

from torch import fx

from backquant.errors import CaptureError, first_line
from backquant.graph import as_arguments
from backquant.graph.clone import with_own_state
from backquant.graph.costs import GraphCosts, costs_and_outputs


def costs_of(
    module: fx.GraphModule, example_inputs: Any, origin: str = "symbolic trace"
) -> tuple[GraphCosts, Any]:
    """Multiply-adds of the nodes of ``module`` on inputs that the model accepts, their kinds of values, and
    what the graph returns for them.

    Raises ``CaptureError`` when the graph fails on them: the capture, of which ``origin`` is the name, took
    another way through ``forward`` than a call does (``if mask is None:`` is decided while tracing, where
    ``mask`` is a stand-in; models ask whether they are exported).

    >>> import torch
    >>> module = fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 3)))
    >>> costs_of(module, torch.zeros(1, 2))[0].multiply_adds
    {'_0': 6}
    """
    try:
        with with_own_state(module):
            return costs_and_outputs(module, example_inputs)
    except Exception as error:
        reason = first_line(error)
        if origin == "torch.export":
            raise _of_export(module, reason, str(error)) from error
        where, fix = _advice(left_out(module, example_inputs), str(error))
        raise CaptureError(
            f"the traced model fails on inputs that the model accepts: {reason}",
            where=where,
            fix=fix,
        ) from error


_NODE = re.compile(r"While executing %(\w+)")


def _of_export(module: fx.GraphModule, reason: str, words: str) -> CaptureError:
    found = _NODE.search(words)
    nodes = {node.name: node for node in module.graph.nodes} if found else {}
    node = nodes.get(found[1]) if found else None
    where = "forward" if node is None else f"node {node.name!r}, {node.target}"
    if "vmap" in words:
        return CaptureError(
            "the exported model reads a value from inside of a function that torch.vmap maps, as a constant",
            where=where,
            fix="write what torch.vmap maps with broadcasting, f(a[:, None], b[None]), or go part by part,\n"
            "with what each is called with: model.set_submodule(path, backquant.quantize(part, ...))",
        )
    return CaptureError(
        f"the exported model fails on inputs that the model accepts: {reason}",
        where=where,
        fix="the model does something else while it is exported (torch.compiler.is_exporting), such as\n"
        "making a mask that a call leaves out: quantize a module whose forward calls its parts as a\n"
        "call does, self.model.encoder(self.model.embeddings(input_ids))",
    )


def _advice(names: list[str], words: str) -> tuple[str, str]:
    """Where the trace went wrong, and what to do: arguments that were left out are the likeliest cause."""
    if names:
        return (
            f"arguments that were left out: {', '.join(names)}",
            "tracing decides about branches on arguments (if mask is None) once, for any value:\n"
            "wrap the model in a module whose forward takes just the arguments that you pass",
        )
    node = _NODE.search(words)
    return (
        f"node {node[1]!r} of the trace" if node else "forward",
        "a symbolic trace records one way through forward, for all values and sizes:\n"
        'capture="export", or leave the part out:\n'
        "PrepareCustomConfig().set_non_traceable_module_names([...])  # it stays in float",
    )


def left_out(module: fx.GraphModule, example_inputs: Any) -> list[str]:
    """Arguments that are ``None`` where nobody passes them, and that ``example_inputs`` does not give.

    >>> left_out(fx.symbolic_trace(lambda x, mask=None: x), 1)
    ['mask']
    """
    if example_inputs is None:
        return []
    args, kwargs = as_arguments(example_inputs)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [
        str(node.target)
        for node in placeholders[len(args) :]
        if node.args and node.args[0] is None and str(node.target) not in kwargs
    ]
