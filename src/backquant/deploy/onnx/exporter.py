"""PyTorch's ONNX exporter, whose table of translations is made once in a process.

``torch.onnx.export`` makes that table anew at each call, from the source of some 500 functions, which takes
seconds even for the smallest model. The table and the function that takes it are private to PyTorch: where a
version has them elsewhere, ``torch.onnx.export`` is called as documented.
"""

from __future__ import annotations

import ast
import copy
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from backquant.deploy.job import ExportJob
from backquant.deploy.onnx.translate import Table, own_translations, translations
from backquant.deploy.roundings import unstated_rounding
from backquant.graph import register_quantized_decomposed
from backquant.graph.silence import quiet
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode

if TYPE_CHECKING:
    import onnx_ir as ir

_PLACE = "torch.onnx._internal.exporter"


def exported_to_onnx(program: Any, table: Mapping[Any, Callable[..., Any]], opset: int) -> Any:
    """``torch.onnx.export`` of a captured program, with translations of one's own.

    >>> from backquant.graph.silence import quiet
    >>> program = torch.export.export(torch.nn.ReLU(), (torch.zeros(2),))
    >>> with quiet():
    ...     made = exported_to_onnx(program, {}, 18)
    >>> [node.op_type for node in made.model.graph]
    ['Relu']
    """
    registry = _with(_known(opset), table)
    if registry is None:
        return torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            opset_version=opset,
            custom_translation_table=dict(table),
            optimize=False,
        )
    core = importlib.import_module(f"{_PLACE}._core")
    return core.export(
        program, registry=registry, verbose=False, optimize=False, opset_version=opset
    )


def is_translated() -> Callable[[Any], bool] | None:
    """Whether the exporter knows an overload; ``None`` where that cannot be asked.

    >>> known = is_translated()
    >>> known is None or known(torch.ops.aten.relu.default)
    True
    """
    registry = _known(0)
    return None if registry is None else registry.is_registered


def _known(opset: int) -> Any:
    """The exporter's table for an operator set (0: that which it is written for)."""
    try:
        importlib.import_module(f"{_PLACE}._core").export  # noqa: B018 - whether it is there
        return _read(max(opset, importlib.import_module(f"{_PLACE}._constants").TORCHLIB_OPSET))
    except (ImportError, AttributeError, TypeError):
        return None


@lru_cache(maxsize=4)
def _read(opset: int) -> Any:
    kind = importlib.import_module(f"{_PLACE}._registration").ONNXRegistry
    return kind.from_torchlib(opset_version=opset)


def _with(registry: Any, table: Mapping[Any, Callable[..., Any]]) -> Any:
    """A copy of ``registry`` with ``table``, which comes first; ``None`` of ``None``."""
    if registry is None:
        return None
    made = copy.copy(registry)
    made.functions = {name: list(known) for name, known in registry.functions.items()}
    for overload, function in table.items():
        made.register_op(overload, function)
    return made


# Operators without an ONNX translation, found in the captured program before anything is written.


def untranslated(job: ExportJob, more: Table | None = None) -> Sequence[Reason]:
    """The operators of ``job`` that neither have an ONNX translation (``more``: of the target) nor decompose,
    by node."""
    register_quantized_decomposed()
    own = {**translations(), **(more or {}), **own_translations(job)}
    if unstated := tuple(unstated_rounding(job, "ONNX", own)):
        return unstated
    with quiet():
        registered = is_translated()
        if registered is None:
            return ()
        decomposed = torch.export.default_decompositions()
    refused: dict[str, Reason] = {}
    for node in job.program.exported.graph.nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        if not node.users:  # assertions, which no file holds
            continue
        if target in own or registered(target) or target in decomposed or target._can_decompose():
            continue
        origin = job.program.origins.get(node.name, node.name)
        refused.setdefault(
            origin,
            Reason(
                origin,
                ReasonCode.NO_TRANSLATION,
                asked=str(target),
                admitted="the ONNX exporter has no translation of it",
                fix="write that part of the model with operators that ONNX has",
                place=job.place_of(origin),
            ),
        )
    return tuple(refused.values())


# ONNX nodes are told apart by the reference graph's node that each was made for.


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


def _only_reader(node: ir.Node) -> Any:
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
