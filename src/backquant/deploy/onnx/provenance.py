"""ONNX nodes are told apart by the reference graph's node that each was made for."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

#: The key of a node's metadata that holds the name of the reference graph's node.
ORIGIN = "backquant.node"
_SCOPES = "pkg.torch.onnx.name_scopes"


def name_nodes(model: Any) -> None:
    """Record in each node's metadata what it was made for, and name it so; names stay unique.

    The exporter's own metadata goes: it holds file names of the machine that exported.
    """
    taken: dict[str, int] = {}
    for node in model.graph:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
        origin = scopes[0] if len(scopes) > 1 else ""
        node.metadata_props.clear()
        if origin:
            node.metadata_props[ORIGIN] = origin
        base = f"{origin}/{node.op_type}" if origin else node.op_type
        taken[base] = taken.get(base, 0) + 1
        node.name = base if taken[base] == 1 else f"{base}_{taken[base]}"


# What ONNX Runtime appends to the name of a result where it makes blocks of channels, and to other new names.
_IN_BLOCKS = ("_nchwc", "_bn")
_ANEW = re.compile(r"_token_\d+")
_ANEW_AT_END = re.compile(r"_token_\d+$")


def origin_of(name: str, origins: Mapping[str, str]) -> str:
    """The reference graph's node that a runtime's node or tensor comes from: runtimes append to names, behind
    a slash, a number, or an ending that stands for another layout.

    >>> origin_of("fc/MatMul/Fused", {"fc/MatMul": "fc"}), origin_of("other", {})
    ('fc', '')
    >>> origin_of("fc/MatMul_token_7", {"fc/MatMul": "fc"}), origin_of("item_bn_nchwc", {"item": "norm"})
    ('fc', 'norm')
    """
    node = _ANEW_AT_END.sub("", name)
    if (
        name not in origins and node in origins
    ):  # a tensor may have the name of another node's origin
        return origins[node]
    return _origin_of(name, origins) or _origin_of(_ANEW.split(name)[0], origins)


def _origin_of(name: str, origins: Mapping[str, str]) -> str:
    for ending in _IN_BLOCKS:
        if name not in origins:
            name = name.removesuffix(ending)
    while name and name not in origins:
        name = name.rpartition("/")[0]
    return origins.get(name, "")


def origins_of(model: Any) -> dict[str, str]:
    """The origin of each node of ``model`` and of each tensor that one makes, by name."""
    found: dict[str, str] = {}
    for node in model.graph:
        origin = node.metadata_props.get(ORIGIN)
        if origin is not None:
            found.update({str(output.name): origin for output in node.outputs})
            found[str(node.name)] = origin
    return found


def followers(model: Any) -> dict[str, str]:
    """For each origin whose result one node reads: the origin of that node.

    What the exporter writes without an origin (a ``Split`` in the place of a sequence) is passed through.
    """
    found: dict[str, str] = {}
    for node in model.graph:
        origin = node.metadata_props.get(ORIGIN)
        reader = None if origin is None else _only_reader(node)
        while reader is not None and ORIGIN not in reader.metadata_props:
            reader = _only_reader(reader)
        if reader is not None and reader.metadata_props[ORIGIN] != origin:
            found[origin] = reader.metadata_props[ORIGIN]
    return found


def _only_reader(node: Any) -> Any:
    readers = [use.node for output in node.outputs for use in output.uses()]
    return readers[0] if len(readers) == 1 else None


def readers_of_weights(model: Any) -> dict[str, str]:
    """For each constant that one node dequantizes for one other: the origin of that other, by its name."""
    found: dict[str, str] = {}
    for node in model.graph:
        if node.op_type != "DequantizeLinear" or node.inputs[0].const_value is None:
            continue
        readers = [use.node for use in node.outputs[0].uses()]
        if len(readers) == 1 and len(node.inputs[0].uses()) == 1:
            found[str(node.inputs[0].name)] = readers[0].metadata_props.get(ORIGIN, "")
    return found
