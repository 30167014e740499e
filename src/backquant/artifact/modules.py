"""Modules as data: class path, plain attributes, parameters and buffers; and back without ``__init__``.

1. A module with ``artifact_config()`` / ``from_artifact(config, tensors)`` says itself what it needs
   (kernel modules: their packed weights are rebuilt).
2. A ``torch.fx.GraphModule`` is written as its graph, its children and its preserved attributes.
3. Any other module of an admitted package is written attribute by attribute.
4. A module of another class (the user's own leaf), or with hooks on its calls, is refused by name.
5. A module that stands in several places is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx, nn
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY

from backquant.artifact import labels
from backquant.artifact.functions import function_path, is_within
from backquant.artifact.graph import check_targets, decode_graph, encode_graph
from backquant.artifact.growth import check_growth
from backquant.artifact.json_values import Decoder, Encoder
from backquant.artifact.kernel_tensors import check_tensors
from backquant.artifact.kernels import check_config
from backquant.artifact.labels import (
    check_keyword,
    check_path,
    class_path,
    find_module_class,
    renamed,
    storable_path,
)
from backquant.artifact.module_checks import check_attribute_names, check_module, hides_of_class
from backquant.errors import ArtifactError
from backquant.graph import DeferredGraphModule, copied_graph, inline_call
from backquant.graph.hooks import has_own_methods, removal_of
from backquant.lower.kernels.configured import decode_config


@runtime_checkable
class _Storable(Protocol):
    """A module that says itself what it needs."""

    def artifact_config(self) -> dict[str, Any]:
        """JSON-able configuration."""

    @classmethod
    def from_artifact(cls, config: dict[str, Any], tensors: dict[str, Any]) -> nn.Module:
        """The module again, from its configuration and its parameters and buffers by name."""


_INTERNAL = frozenset(nn.Module().__dict__)
# Hooks on calls; those on state_dicts compute nothing and are left out.
_HOOKS = tuple(n for n in _INTERNAL if n.endswith("_hooks") and "state_dict" not in n)
_REBUILT = frozenset({"_flat_weights", "_flat_weight_refs"})  # by nn.RNNBase


class ModuleEncoder:
    """Writes a module and its children; values go through ``encoder``."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._written: dict[int, str] = {}

    def encode(self, module: nn.Module, path: str = "") -> dict[str, Any]:
        """JSON form of ``module``; raises ``ArtifactError`` naming what cannot be stored.

        >>> ModuleEncoder(Encoder(lambda tensor: "t0")).encode(nn.ReLU())["attributes"]
        {'inplace': False}
        """
        if id(module) in self._written:
            return {"same_as": self._written[id(module)]}
        self._written[id(module)] = path
        where = path or "the model"
        entry: dict[str, Any] = {"training": module.training}
        if isinstance(module, torch.fx.GraphModule):
            graph = inlined(module.graph, self._encoder.allow)
            entry["graph"] = encode_graph(graph, self._encoder, path)
            preserved = module.meta.get(_USER_PRESERVED_ATTRIBUTES_KEY, {})
            entry["preserved"] = self._values(module, preserved, path)
        else:
            entry["class"] = storable_path(type(module), where, self._encoder.allow)
        entry |= self._tables(module, path)
        _refuse_hooks(module, where)
        if "class" in entry and isinstance(module, _Storable):
            entry["config"] = self._encoder.encode(module.artifact_config(), path)
            return entry
        if "class" in entry:
            _refuse_own_methods(module, where)
            own = {k: v for k, v in vars(module).items() if not _is_left_out(module, k, v)}
            entry["attributes"] = self._values(module, own, path)
        entry["children"] = {
            name: self.encode(child, _checked(f"{path}.{name}".lstrip("."), where))
            for name, child in module._modules.items()
            if child is not None
        }
        entry["absent"] = [name for name, child in module._modules.items() if child is None]
        return {key: value for key, value in entry.items() if value not in ({}, [])}

    def _values(self, module: nn.Module, values: dict[str, Any], path: str) -> dict[str, Any]:
        kind = type(module).__name__
        return {
            name: self._encoder.encode(value, f"{path}.{name} ({kind})".lstrip("."))
            for name, value in values.items()
        }

    def _tables(self, module: nn.Module, path: str) -> dict[str, Any]:
        parameters = module._parameters.items()
        return {
            "parameters": self._values(module, dict(parameters), path),
            "frozen": [name for name, p in parameters if p is not None and not p.requires_grad],
            "buffers": self._values(module, dict(module._buffers), path),
            "non_persistent": sorted(module._non_persistent_buffers_set),
        }


def _is_left_out(module: nn.Module, name: str, value: Any) -> bool:
    """Whether an attribute is not written. Data that hides a method of its class is a note that a library
    made of a layer (``layer.type = "..."``): its operator does not read it, and no file may bring it."""
    is_note = hides_of_class(type(module), name) and not callable(value)
    return is_note or name in _INTERNAL | _REBUILT


def _refuse_own_methods(module: nn.Module, where: str) -> None:
    if has_own_methods(module):
        raise ArtifactError(
            f"methods were assigned to the {type(module).__name__}, and a file loads without your code",
            where=where,
            fix="write them as a class of their own, or keep the model in memory",
        )


def _refuse_hooks(module: nn.Module, where: str) -> None:
    for name in _HOOKS:
        hooks = getattr(module, name, None)
        if hooks:
            kind = name.strip("_").replace("_", " ").removesuffix("s")
            undo = removal_of(next(iter(hooks.values())))
            raise ArtifactError(
                f"the {type(module).__name__} has a {kind}, and hooks cannot be stored",
                where=where,
                fix=f"before quantizing: {undo}",
            )


class ModuleDecoder:
    """Reads what ``ModuleEncoder`` wrote. No ``__init__`` of a stored class runs but the kernels' own."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._read: dict[str, nn.Module] = {}

    def decode(self, entry: dict[str, Any], path: str = "") -> nn.Module:
        """The module that ``entry`` describes; raises ``ArtifactError`` for what is not admitted."""
        if "same_as" in entry:
            return self._same(entry["same_as"], path)
        is_kernel = "config" in entry
        module = self._from_config(entry, path) if is_kernel else self._from_parts(entry, path)
        self._read[path] = module
        return module

    def _same(self, known: str, path: str) -> nn.Module:
        if not isinstance(known, str) or known not in self._read:
            raise ArtifactError(f"there is no module {known!r} before this one", where=path)
        return self._read[known]

    def _from_config(self, entry: dict[str, Any], path: str) -> nn.Module:
        cls = find_module_class(entry["class"], self._decoder.allow)
        if not issubclass(cls, _Storable):
            raise ArtifactError(f"{class_path(cls)} is not built from a configuration")
        tables = (entry.get("parameters", {}), entry.get("buffers", {}))
        tensors = {name: self._decoder.decode(value) for t in tables for name, value in t.items()}
        config = self._decoder.decode(entry["config"])
        config_class = getattr(cls, "config_class", None)
        if config_class is not None:
            decoded = decode_config(config_class, config)
            check_config(cls, decoded, path)
            check_tensors(cls, decoded, tensors, path)
            weight = tensors.get("weight")
            kernel = None if weight is None or not hasattr(decoded, "stride") else weight.shape[2:]
            kind = getattr(decoded, "operator", cls.__name__)
            check_growth(kind, vars(decoded), kernel, path)
        elif not is_within(entry["class"], self._decoder.allow):
            raise ArtifactError(f"{entry['class']} is no kernel that a file may build", where=path)
        module = cls.from_artifact(config, tensors)
        assert isinstance(module, nn.Module)
        unread = set(tensors) - set(module._parameters) - set(module._buffers)
        if unread and config_class is not None:
            raise ArtifactError(
                f"{cls.__name__} has no tensor {labels.shown(min(unread))}",
                where=path or "the model",
            )
        return module.train(entry["training"])

    def _from_parts(self, entry: dict[str, Any], path: str) -> nn.Module:
        is_graph = "graph" in entry
        cls = nn.Module if is_graph else find_module_class(entry["class"], self._decoder.allow)
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        check_attribute_names(cls, entry, _INTERNAL, path)
        for name, value in entry.get("attributes", {}).items():
            module.__dict__[name] = self._decoder.decode(value)
        self._fill(module, entry, path)
        for name, child in renamed(entry.get("children", {}), path).items():
            module._modules[name] = self.decode(child, f"{path}.{name}".lstrip("."))
        module._modules.update(dict.fromkeys(check_path(n, path) for n in entry.get("absent", ())))
        check_module(module, path)
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
        if is_graph:
            module = self._graph_module(module, entry, path)
        module.training = entry["training"]
        return module

    def _fill(self, module: nn.Module, entry: dict[str, Any], path: str) -> None:
        frozen = {check_path(name, path) for name in entry.get("frozen", ())}
        for name, value in renamed(entry.get("parameters", {}), path).items():
            tensor = self._decoder.decode(value)
            if tensor is not None:
                _check_tensor(name, tensor)
                tensor = self._decoder.tensors.parameter(tensor, name not in frozen)
            module._parameters[name] = tensor
        for name, value in renamed(entry.get("buffers", {}), path).items():
            buffer = self._decoder.decode(value)
            if buffer is not None:
                _check_tensor(name, buffer)
            module._buffers[name] = buffer
        hidden = entry.get("non_persistent", ())
        module._non_persistent_buffers_set = {check_path(name, path) for name in hidden}

    def _graph_module(self, root: nn.Module, entry: dict[str, Any], path: str) -> nn.Module:
        graph = decode_graph(entry["graph"], self._decoder)
        check_targets(graph, root, path)
        module = DeferredGraphModule(root, graph)
        kept = {
            check_keyword(name, path): self._decoder.decode(value)
            for name, value in entry.get("preserved", {}).items()
        }
        for name, value in kept.items():
            if hasattr(module, name):
                raise ArtifactError(f"{name!r} is no attribute to preserve", where=path)
            setattr(module, name, value)
        if kept:
            module.meta[_USER_PRESERVED_ATTRIBUTES_KEY] = kept
        return module


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise ArtifactError(f"{name} is no tensor", where=name)


def _checked(path: str, where: str) -> str:
    """``path`` as it is, if a file can hold it."""
    check_path(path, where)
    return path


# Functions that a trace left whole (``torch.fx.wrap``), taken apart for the file where that is possible.
#
# A file holds operators, not anybody's functions; see ``backquant.graph.wrapped``.


def inlined(graph: fx.Graph, allow: Sequence[str] = ()) -> fx.Graph:
    """``graph``, or one like it with the operators of functions in place of calls that no file can hold.

    A function that cannot be taken apart is left: storing it is refused by name.

    >>> def twice(x, times):
    ...     return x * 2 if times == 2 else x
    >>> graph = fx.Graph()
    >>> _ = graph.output(graph.call_function(twice, (graph.placeholder("x"), 2)))
    >>> [node.name for node in inlined(graph).nodes], len(graph.nodes)
    (['x', 'mul', 'output'], 3)
    """
    if not any(_is_foreign(node, allow) for node in graph.nodes):
        return graph
    graph = copied_graph(graph)
    for node in list(graph.nodes):
        if _is_foreign(node, allow):
            inline_call(graph, node)
    return graph


def _is_foreign(node: fx.Node, allow: Sequence[str]) -> bool:
    if node.op != "call_function" or not isinstance(node.target, FunctionType):
        return False
    try:
        function_path(node.target, allow)
    except ArtifactError:
        return True
    return False
