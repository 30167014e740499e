"""The classes that an exported model returns: by name in the file, made again where that is safe.

A file loads without anybody's code, and gives an ``OutputRecord`` in place of a class it does not know. The
classes of outputs and caches of ``transformers`` it does know: they are imported when a file that names them
is loaded, and ``transformers`` is installed. So are classes of packages that are allowed. An output class is
called with its fields; of any other an empty object is made, and its attributes are set: no code of a file
runs, and no ``__init__`` but that of ``ModelOutput``.
"""

from __future__ import annotations

import importlib
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils import _pytree as pytree

from backquant.artifact.functions import find_defined, is_within
from backquant.artifact.values import Decoder, Encoder
from backquant.errors import ArtifactError
from backquant.graph.export import Structure, maker
from backquant.graph.objects import Shell

# Modules of transformers that define outputs and caches, and do nothing when they are imported.
_KNOWN = re.compile(r"transformers\.(modeling_outputs|cache_utils|models\.\w+\.modeling_\w+)\.\w+")

_ORDERED = "collections.OrderedDict"


def encode_records(structure: Structure, data: dict[str, Any], encoder: Encoder) -> None:
    """Add to ``data``, the JSON form of ``structure``, what is needed to make its records again.

    >>> data = Structure("value").to_dict()
    >>> encode_records(Structure("value"), data, Encoder(lambda tensor: ""))
    >>> data
    {'kind': 'value'}
    """
    for part, inner in zip(structure.parts, data.get("parts", ()), strict=True):
        encode_records(part, inner, encoder)
    shell = getattr(structure.make, "context", None)
    if structure.kind != "record" or not _is_known(structure.name, encoder.allow):
        return
    if not isinstance(shell, Shell):
        data["made"] = "called"
        return
    try:
        data["made"] = {name: _encode(value, encoder) for name, value in shell.rest.items()}
    except ArtifactError:  # attributes that no file can hold: it comes back as an OutputRecord
        return


def _encode(value: Any, encoder: Encoder) -> Any:
    if isinstance(value, type):
        path = f"{value.__module__}.{value.__qualname__}"
        if not _is_known(path, encoder.allow):
            raise ArtifactError("a class that is not known", where=path)
        return {"record_class": path}
    return encoder.encode(value, "an output")


def decode_records(structure: Structure, data: Mapping[str, Any], decoder: Decoder) -> Structure:
    """``structure``, which was read from ``data``, with records that can be made again."""
    parts = tuple(
        decode_records(part, inner, decoder)
        for part, inner in zip(structure.parts, data.get("parts", ()), strict=True)
    )
    structure = replace(structure, parts=parts)
    if structure.kind != "record" or "made" not in data:
        return structure
    cls = _found(structure.name, decoder.allow)
    if cls is None:
        return structure
    if data["made"] == "called":
        is_output = cls in pytree.SUPPORTED_NODES and hasattr(cls, "to_tuple")
        is_output = is_output or cls is OrderedDict
        is_named = issubclass(cls, tuple) and getattr(cls, "_fields", None) == structure.keys
        good = is_output or is_named
        return replace(structure, make=maker(cls, list(structure.keys))) if good else structure
    rest = {str(name): _decode(value, decoder) for name, value in data["made"].items()}
    if any(name.startswith("__") or callable(getattr(cls, name, None)) for name in rest):
        raise ArtifactError("an attribute of an output hides a method", where=structure.name)
    if not all(isinstance(name, str) for name in structure.keys):
        raise ArtifactError("the attributes of an output have no names", where=structure.name)
    return replace(structure, make=maker(cls, Shell(cls, structure.keys, rest)))


def _decode(value: Any, decoder: Decoder) -> Any:
    if isinstance(value, dict) and list(value) == ["record_class"]:
        return _found(value["record_class"], decoder.allow)
    return decoder.decode(value)


def _is_known(path: str, allow: Sequence[str]) -> bool:
    return path == _ORDERED or bool(_KNOWN.fullmatch(path)) or is_within(path, allow)


def _found(path: str, allow: Sequence[str]) -> type | None:
    """The class, if it is known and its package is installed."""
    if not isinstance(path, str) or not _is_known(path, allow):
        return None
    if path == _ORDERED:
        return OrderedDict
    try:
        importlib.import_module(path.split(".", maxsplit=1)[0])
        found = find_defined(path, "class")
    except (ImportError, ArtifactError):
        return None
    is_plain = isinstance(found, type) and found.__new__ in (object.__new__, dict.__new__)
    is_tuple = isinstance(found, type) and issubclass(found, tuple)
    is_output = isinstance(found, type) and hasattr(found, "to_tuple")
    return found if is_plain or is_tuple or is_output else None
