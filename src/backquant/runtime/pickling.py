"""Pickling of lowered models: nodes with their names, operators and functions by name.

``backquant.save`` writes a file that holds no pickle; this is for what pickles whole models (copies
between processes, ``torch.save``).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from torch import nn

from backquant.errors import ArtifactError
from backquant.graph.call_table import CallTableModule
from backquant.prepare.pickling import dump, graph_from_rows, graph_rows, load

_GRAPH = "graph_module"
_SHOWN = "_shown"
# Attributes that a graph module generates from its graph.
_OWN = frozenset({"_graph", "_code", "_tracer_cls", "_tracer_extras", "shape_env"})


def pickled(state: Mapping[str, Any]) -> bytes:
    """The state of a module with a ``graph_module`` as bytes.

    Raises ArtifactError when it holds what ``pickle`` cannot store, such as a fuser that is a lambda.

    >>> import torch
    >>> state, root, rows = load(pickled({"graph_module": torch.fx.symbolic_trace(nn.ReLU())}))
    >>> [row[3] for row in rows]
    ['input_1', 'relu', 'output']
    """
    rest = dict(state)
    graph_module: Any = rest.pop(_GRAPH)
    root = {name: value for name, value in graph_module.__dict__.items() if name not in _OWN}
    if _SHOWN in rest:
        shown = rest[_SHOWN]
        rest[_SHOWN] = {**shown, "_graph": graph_rows(shown["_graph"])}
    try:
        return dump((rest, root, graph_rows(graph_module.graph)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ArtifactError(
            f"the model holds something that pickle cannot store: {error}",
            where="pickle of a QuantizedModel",
            fix='backquant.save(quantized, "model.bq"), and backquant.load("model.bq")',
        ) from error


def unpickled(stored: bytes) -> dict[str, Any]:
    """The inverse of ``pickled``. As with any pickle, load only what you trust.

    >>> import torch
    >>> again = unpickled(pickled({"graph_module": torch.fx.symbolic_trace(nn.ReLU())}))["graph_module"]
    >>> again(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    state, body, rows = load(stored)
    root = nn.Module()
    root.__dict__.update({name: value for name, value in body.items() if name != "meta"})
    graph_module = CallTableModule(root, graph_from_rows(rows))
    graph_module.meta.update(body.get("meta", {}))
    graph_module.train(root.training)
    if _SHOWN in state:
        state[_SHOWN]["_graph"] = graph_from_rows(state[_SHOWN]["_graph"])
    return {**state, _GRAPH: graph_module}
