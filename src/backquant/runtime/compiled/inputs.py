"""Which inputs compiled code was made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind as Kind
from torch.export.graph_signature import TensorArgument

_ANY = 1 << 62


@dataclass(frozen=True)
class InputKind:
    """A tensor of ``dtype`` and ``shape``, in which a name stands for a dynamic size within ``bounds``; or,
    without a dtype, the very ``value``.

    >>> kind = InputKind(torch.float32, ("batch", 3), {"batch": (1, 8)})
    >>> [kind.admits(torch.zeros(n, 3), {}) for n in (1, 8, 9)]
    [True, True, False]
    >>> kind.admits(torch._neg_view(torch.zeros(1, 3)), {})
    False
    >>> print(kind)
    float32[batch, 3]
    """

    dtype: torch.dtype | None
    shape: tuple[int | str, ...] = ()
    bounds: dict[str, tuple[int, int]] | None = None
    value: Any = None

    def admits(self, value: Any, sizes: dict[str, int]) -> bool:
        """Whether ``value`` is such an input; ``sizes`` holds what names stood for in other inputs."""
        if self.dtype is None:
            return type(value) is type(self.value) and bool(value == self.value)
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.dtype != self.dtype:
            return False
        if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized:
            return False
        if value.is_neg() or value.is_conj() or len(value.shape) != len(self.shape):
            return False  # lazy negation or conjugation: memory holds other values than the tensor
        return all(
            size == wanted if isinstance(wanted, int) else self._fits(wanted, size, sizes)
            for size, wanted in zip(value.shape, self.shape, strict=True)
        )

    def _fits(self, name: str, size: int, sizes: dict[str, int]) -> bool:
        low, high = (self.bounds or {}).get(name, (1, _ANY))
        return low <= size <= high and sizes.setdefault(name, size) == size

    def __str__(self) -> str:
        if self.dtype is None:
            return repr(self.value)
        sizes = ", ".join(str(size) for size in self.shape)
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}]"


def kinds_of(exported: ExportedProgram) -> tuple[InputKind, ...]:
    """The inputs of an exported program, in the order of the flattened arguments."""
    values = {
        node.name: node.meta.get("val") for node in exported.graph.find_nodes(op="placeholder")
    }
    bounds = {str(name): _bounds(found) for name, found in exported.range_constraints.items()}
    kinds = []
    for spec in exported.graph_signature.input_specs:
        if spec.kind is not Kind.USER_INPUT:
            continue
        if not isinstance(spec.arg, TensorArgument):
            kinds.append(InputKind(None, value=getattr(spec.arg, "value", None)))
            continue
        tensor = values[spec.arg.name]
        shape = tuple(n if isinstance(n, int) else str(n) for n in tensor.shape)
        own = {n: bounds[n] for n in shape if isinstance(n, str) and n in bounds}
        kinds.append(InputKind(tensor.dtype, shape, own))
    return tuple(kinds)


def _bounds(found: Any) -> tuple[int, int]:
    """Exports take no size below 2 for dynamic; the code takes 1 like any other."""
    low, high = (int(n) if abs(n) < _ANY else _ANY for n in (found.lower, found.upper))
    return (1 if low == 2 else low), high
