"""Pickling of lowered models: nodes with their names, operators and functions by name.

``backquant.save`` writes a file that holds no pickle; this is for what pickles whole models (copies
between processes, ``torch.save``).
"""

from __future__ import annotations

import pickle
from typing import Any

from torch import fx, nn

from backquant.errors import ArtifactError
from backquant.prepare.pickling import dump, graph_from_rows, graph_rows, load

__all__ = ["pickled", "unpickled"]

_GRAPH = "graph_module"
# What a graph module makes anew from its graph.
_OWN = frozenset({"_graph", "_code", "_tracer_cls", "_tracer_extras", "shape_env"})


def pickled(model: nn.Module) -> bytes:
    """A module with a child ``graph_module`` as bytes. Raises ArtifactError when it holds what
    ``pickle`` cannot store, such as a fuser that is a lambda.

    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.graph_module = fx.symbolic_trace(nn.ReLU())
    >>> state, root, rows = load(pickled(Model()))
    >>> [row[3] for row in rows]
    ['input_1', 'relu', 'output']
    """
    state = {**model.__dict__, "_modules": {**model._modules}}
    graph_module: Any = state["_modules"].pop(_GRAPH)
    root = {name: value for name, value in graph_module.__dict__.items() if name not in _OWN}
    try:
        return dump((state, root, graph_rows(graph_module.graph)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ArtifactError(
            f"the model holds something that pickle cannot store: {error}",
            where=type(model).__name__,
            fix="backquant.save(quantized, path), and backquant.load(path)",
        ) from error


def unpickled(kind: type[nn.Module], stored: bytes) -> nn.Module:
    """The inverse of ``pickled``. As with any pickle, load only what you trust.

    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.graph_module = fx.symbolic_trace(nn.ReLU())
    >>> import torch
    >>> unpickled(Model, pickled(Model())).graph_module(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    state, body, rows = load(stored)
    root = nn.Module()
    root.__dict__.update({name: value for name, value in body.items() if name != "meta"})
    graph_module = fx.GraphModule(root, graph_from_rows(rows))
    graph_module.meta.update(body.get("meta", {}))
    graph_module.train(root.training)
    model = kind.__new__(kind)
    model.__dict__.update(state)
    model._modules = {_GRAPH: graph_module, **state["_modules"]}
    return model
