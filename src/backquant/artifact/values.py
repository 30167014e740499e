"""Arguments and attributes as JSON, and back: every value is a scalar or a tagged object.

Tags: ``{"node": name}``, ``{"tensor": key}``, ``{"tuple": […]}``, ``{"dict": [[k, v], …]}``,
``{"slice": [start, stop, step]}``, ``{"dtype": "float32"}``, ``{"device": "cpu"}``, ``{"float": "inf"}``,
``{"layout"|"memory_format"|"qscheme": name}``, ``{"function"|"class": import path}``, ``{"ellipsis": true}``.
Lists stay lists.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch.fx import Node

from backquant.artifact.callables import class_path, function_path, resolve
from backquant.errors import ArtifactError

__all__ = ["Decoder", "Encoder"]

_QSCHEMES = {
    str(scheme): scheme
    for scheme in (
        torch.per_tensor_affine,
        torch.per_tensor_symmetric,
        torch.per_channel_affine,
        torch.per_channel_symmetric,
        torch.per_channel_affine_float_qparams,
    )
}
_NAMED: tuple[tuple[type, str], ...] = (
    (torch.dtype, "dtype"),
    (torch.layout, "layout"),
    (torch.memory_format, "memory_format"),
)


class Encoder:
    """Writes values; tensors go through ``store`` which returns their key."""

    def __init__(self, store: Callable[[torch.Tensor], str], allow: Sequence[str] = ()) -> None:
        self._store = store
        self.allow = tuple(allow)

    def encode(self, value: Any, where: str) -> Any:  # size: one case per kind of value
        """JSON form of ``value``; raises ``ArtifactError`` naming ``where`` for what has none."""
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, Node):
            return {"node": value.name}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._store(value)}
        if isinstance(value, tuple):
            return {"tuple": [self.encode(item, where) for item in value]}
        if isinstance(value, list):
            return [self.encode(item, where) for item in value]
        if isinstance(value, dict | OrderedDict):
            pairs = value.items()
            return {"dict": [[self.encode(k, where), self.encode(v, where)] for k, v in pairs]}
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return {"slice": [self.encode(part, where) for part in parts]}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, torch.qscheme):
            return {"qscheme": str(value)}
        if value is Ellipsis:
            return {"ellipsis": True}
        for kind, tag in _NAMED:
            if isinstance(value, kind):
                return {tag: str(value).removeprefix("torch.")}
        if isinstance(value, type):
            return {"class": class_path(value)}
        if isinstance(value, FunctionType | BuiltinFunctionType) or callable(value):
            return {"function": function_path(value, self.allow)}
        raise ArtifactError(
            f"a value of type {class_path(type(value))} cannot be stored",
            where=where,
            fix="use plain numbers, strings, tuples, lists, dicts, tensors and torch constants",
        )


class Decoder:
    """Reads what ``Encoder`` wrote; nodes and tensors are looked up in the given tables."""

    def __init__(
        self,
        tensor: Callable[[str], torch.Tensor],
        nodes: dict[str, Node] | None = None,
        allow: Sequence[str] = (),
    ) -> None:
        self._tensor = tensor
        self._nodes = nodes if nodes is not None else {}
        self.allow = tuple(allow)

    def within(self, nodes: dict[str, Node]) -> Decoder:
        """A decoder of the same tensors for a graph whose nodes are ``nodes``."""
        return Decoder(self._tensor, nodes, self.allow)

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((tag, content),) = value.items()
        handler = getattr(self, f"_read_{tag}", None)
        if handler is None:
            raise ArtifactError(
                f"unknown value tag {tag!r}: the file was written by a newer version"
            )
        return handler(content)

    def _read_node(self, name: str) -> Node:
        return self._nodes[name]

    def _read_tensor(self, key: str) -> torch.Tensor:
        return self._tensor(key)

    def _read_tuple(self, items: list[Any]) -> tuple[Any, ...]:
        return tuple(self.decode(item) for item in items)

    def _read_dict(self, pairs: list[list[Any]]) -> dict[Any, Any]:
        return {self.decode(k): self.decode(v) for k, v in pairs}

    def _read_slice(self, parts: list[Any]) -> slice:
        return slice(*(self.decode(part) for part in parts))

    def _read_float(self, text: str) -> float:
        return float(text)

    def _read_device(self, text: str) -> torch.device:
        return torch.device(text)

    def _read_qscheme(self, text: str) -> torch.qscheme:
        return _QSCHEMES[text]

    def _read_ellipsis(self, _: bool) -> Any:
        return Ellipsis

    def _read_dtype(self, name: str) -> Any:
        return self._constant(name, torch.dtype)

    def _read_layout(self, name: str) -> Any:
        return self._constant(name, torch.layout)

    def _read_memory_format(self, name: str) -> Any:
        return self._constant(name, torch.memory_format)

    def _read_class(self, path: str) -> Any:
        return resolve(path, self.allow)

    def _read_function(self, path: str) -> Any:
        return resolve(path, self.allow)

    def _constant(self, name: str, kind: type) -> Any:
        constant = getattr(torch, name, None)
        if not isinstance(constant, kind):
            raise ArtifactError(f"this build of torch has no {kind.__name__} {name!r}", where=name)
        return constant
