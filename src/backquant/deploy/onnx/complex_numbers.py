"""Complex numbers in the spelling of PyTorch's ONNX exporter, which takes no floats beside them.

A float beside complex numbers is complex, without an imaginary part; floats times a complex constant
(``1j``) are the two parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from backquant.deploy.edits import AtenCalls, replace
from backquant.operators import overload, overloads

__all__ = ["spell_complex"]

_ARITHMETIC = {*overloads("add", "sub", "mul"), overload("mul", "Scalar")}


def spell_complex(graph: fx.Graph) -> None:
    """Apply it to sums, differences and products of an exported ``graph``, in place.

    >>> class Turned(torch.nn.Module):
    ...     def forward(self, x): return x.cos() + 1j * x.sin()
    >>> graph = torch.export.export(Turned(), (torch.zeros(2),)).graph
    >>> spell_complex(graph)
    >>> [node.name for node in graph.nodes if "complex" in node.name]
    ['complex_default', 'complex_default_1']
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _ARITHMETIC and _is_complex(node):
            _spell(node)


def _is_complex(value: Any) -> bool:
    if isinstance(value, fx.Node):
        value = value.meta["val"]
        return isinstance(value, torch.Tensor) and value.is_complex()
    return isinstance(value, complex)


def _spell(node: Any) -> None:
    x, y = node.args[:2]
    write = AtenCalls(node)
    if not isinstance(y, complex):
        for value in (x, y):
            if isinstance(value, fx.Node) and _is_part_of(value, node):
                node.replace_input_with(value, write.complex(value, write.zeros_like(value)))
    elif "mul" in str(node.target) and _is_part_of(x, node):
        replace(node, write.complex(*(write.mul(x, part) for part in (y.real, y.imag))))


def _is_part_of(value: Any, node: fx.Node) -> bool:
    """Whether a value holds floats of the width that the complex numbers of ``node`` have."""
    dtype: torch.dtype = value.meta["val"].dtype
    return dtype.is_floating_point and dtype.to_complex() == node.meta["val"].dtype
