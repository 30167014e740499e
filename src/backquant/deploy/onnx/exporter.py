"""PyTorch's ONNX exporter, whose table of translations is made once in a process.

``torch.onnx.export`` makes that table anew at each call, from the source of some 500 functions, which takes
seconds even for the smallest model. The table and the function that takes it are private to PyTorch: where a
version has them elsewhere, ``torch.onnx.export`` is called as documented.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

_PLACE = "torch.onnx._internal.exporter"


def exported_to_onnx(program: Any, table: Mapping[Any, Callable[..., Any]], opset: int) -> Any:
    """``torch.onnx.export`` of a captured program, with translations of one's own.

    >>> from backquant.graph.quiet import quiet
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
