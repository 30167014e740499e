"""Pickling of lowered models: nodes with their names, operators and functions by name.

``backquant.save`` writes a file that holds no pickle; this is for what pickles whole models (copies
between processes, ``torch.save``).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from backquant.errors import ArtifactError
from backquant.prepare.pickling import dump, graph_from_rows, graph_rows, load

_GRAPH = "graph_module"
# Attributes that a graph module generates from its graph.
_OWN = frozenset({"_graph", "_code", "_tracer_cls", "_tracer_extras", "shape_env"})


def pickled(state: Mapping[str, Any]) -> bytes:
    """The state of a module with a child ``graph_module`` as bytes.

    Raises ArtifactError when it holds what ``pickle`` cannot store, such as a fuser that is a lambda.

    >>> model = nn.ModuleDict({"graph_module": fx.symbolic_trace(nn.ReLU())})
    >>> state, root, rows = load(pickled(model.__dict__))
    >>> [row[3] for row in rows]
    ['input_1', 'relu', 'output']
    """
    modules = dict(state["_modules"])
    graph_module: Any = modules.pop(_GRAPH)
    root = {name: value for name, value in graph_module.__dict__.items() if name not in _OWN}
    try:
        return dump(({**state, "_modules": modules}, root, graph_rows(graph_module.graph)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ArtifactError(
            f"the model holds something that pickle cannot store: {error}",
            where="pickle of a QuantizedModel",
            fix='backquant.save(quantized, "model.bq"), and backquant.load("model.bq")',
        ) from error


def unpickled(stored: bytes) -> dict[str, Any]:
    """The inverse of ``pickled``. As with any pickle, load only what you trust.

    >>> import torch
    >>> model = nn.ModuleDict({"graph_module": fx.symbolic_trace(nn.ReLU())})
    >>> again = unpickled(pickled(model.__dict__))["_modules"]["graph_module"]
    >>> again(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    state, body, rows = load(stored)
    root = nn.Module()
    root.__dict__.update({name: value for name, value in body.items() if name != "meta"})
    graph_module = fx.GraphModule(root, graph_from_rows(rows))
    graph_module.meta.update(body.get("meta", {}))
    graph_module.train(root.training)
    return {**state, "_modules": {_GRAPH: graph_module, **state["_modules"]}}


def held(model: nn.Module) -> dict[str, Any]:
    """What a model holds, with dictionaries of its own, without code.

    >>> layer = nn.Linear(2, 2)
    >>> held(layer)["_parameters"] is layer._parameters
    False
    """
    found = {k: v for k, v in model.__dict__.items() if k not in ("compilation", "_program")}
    return {key: dict(value) if type(value) is dict else value for key, value in found.items()}
