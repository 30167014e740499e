"""Modules as data: class path, plain attributes, parameters and buffers; and back without ``__init__``.

1. A module with ``artifact_config()`` / ``from_artifact(config, tensors)`` says itself what it needs
   (kernel modules: their packed weights are rebuilt).
2. A ``torch.fx.GraphModule`` is written as its graph and its children.
3. Any other module of an allowed package is written attribute by attribute.
4. A module of another package (the user's own leaf class) is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from backquant.artifact.callables import ALLOWED_PACKAGES, class_path, resolve
from backquant.artifact.graph import decode_graph, encode_graph
from backquant.artifact.values import Decoder, Encoder
from backquant.errors import ArtifactError

__all__ = ["decode_module", "encode_module"]


@runtime_checkable
class _Storable(Protocol):
    """A module that says itself what it needs."""

    def artifact_config(self) -> dict[str, Any]:
        """JSON-able configuration."""

    @classmethod
    def from_artifact(cls, config: dict[str, Any], tensors: dict[str, Any]) -> nn.Module:
        """The module again, from its configuration and its parameters and buffers by name."""


_INTERNAL = frozenset(nn.Module().__dict__)
_HOOKS = tuple(name for name in _INTERNAL if name.endswith("_hooks"))
_SKIP = frozenset({"_flat_weights", "_flat_weight_refs"})  # nn.RNNBase rebuilds them


def encode_module(module: nn.Module, encoder: Encoder, path: str) -> dict[str, Any]:
    """JSON form of ``module`` and its children; raises ``ArtifactError`` naming what cannot be stored."""
    _refuse_hooks(module, path)
    cls = class_path(type(module))
    entry: dict[str, Any] = {"training": module.training}
    if isinstance(module, torch.fx.GraphModule):
        entry["graph"] = encode_graph(module.graph, encoder, path)
    elif cls.split(".")[0] not in (*ALLOWED_PACKAGES, *encoder.allow):
        raise ArtifactError(
            f"the module class {cls} cannot be stored: a file loads without your code",
            where=path,
            fix="let the tracer go into it (give it a plain forward), replace it by torch operators, or "
            f'pass allow=("{cls.split(".")[0]}",) to save and load',
        )
    else:
        entry["class"] = cls
    entry["tensors"] = _encode_tensors(module, encoder, path)
    if isinstance(module, _Storable):
        entry["config"] = encoder.encode(module.artifact_config(), path)
        return entry
    if "class" in entry:
        entry["attributes"] = _encode_attributes(module, encoder, path)
    children = {
        name: encode_module(child, encoder, f"{path}.{name}".lstrip("."))
        for name, child in module._modules.items()
        if child is not None
    }
    if children:
        entry["children"] = children
    return entry


def _refuse_hooks(module: nn.Module, path: str) -> None:
    for name in _HOOKS:
        if getattr(module, name, None):
            raise ArtifactError(
                f"the module has a hook ({name.strip('_')}) and hooks cannot be stored",
                where=path or type(module).__name__,
                fix="remove the hook before saving: handle.remove()",
            )


def _encode_tensors(module: nn.Module, encoder: Encoder, path: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for kind, table in (("parameters", module._parameters), ("buffers", module._buffers)):
        if table:
            out[kind] = {name: encoder.encode(value, path) for name, value in table.items()}
    if module._non_persistent_buffers_set:
        out["non_persistent"] = sorted(module._non_persistent_buffers_set)
    return out


def _encode_attributes(module: nn.Module, encoder: Encoder, path: str) -> dict[str, Any]:
    out = {}
    for name, value in module.__dict__.items():
        if name in _INTERNAL or name in _SKIP:
            continue
        out[name] = encoder.encode(value, f"{path}.{name} ({type(module).__name__})")
    return out


def decode_module(entry: dict[str, Any], decoder: Decoder, allow: Sequence[str] = ()) -> nn.Module:
    """The module that ``entry`` describes; no ``__init__`` of a stored class runs but the kernels' own."""
    if "config" in entry:
        cls = _module_class(entry["class"], allow)
        tensors = {
            name: decoder.decode(value)
            for kind in ("parameters", "buffers")
            for name, value in entry["tensors"].get(kind, {}).items()
        }
        module: nn.Module = cls.from_artifact(decoder.decode(entry["config"]), tensors)
        return module.train(entry["training"])
    cls = nn.Module if "graph" in entry else _module_class(entry["class"], allow)
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    for name, value in entry.get("attributes", {}).items():
        module.__dict__[name] = decoder.decode(value)
    _decode_tensors(module, entry["tensors"], decoder)
    for name, child in entry.get("children", {}).items():
        module._modules[name] = decode_module(child, decoder, allow)
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()
    module.training = entry["training"]
    if "graph" not in entry:
        return module
    graph_module = torch.fx.GraphModule(module, decode_graph(entry["graph"], decoder))
    graph_module.training = entry["training"]
    return graph_module


def _module_class(path: str, allow: Sequence[str]) -> type[nn.Module]:
    cls = resolve(path, allow)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ArtifactError(f"{path} is not a module class", where=path)
    return cls


def _decode_tensors(module: nn.Module, tables: dict[str, Any], decoder: Decoder) -> None:
    for name, value in tables.get("parameters", {}).items():
        tensor = decoder.decode(value)
        parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        module._parameters[name] = parameter
    for name, value in tables.get("buffers", {}).items():
        module._buffers[name] = decoder.decode(value)
    module._non_persistent_buffers_set = set(tables.get("non_persistent", []))
