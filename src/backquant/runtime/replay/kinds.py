"""What the calls have in common that one recording answers.

Arguments are taken apart into tensors and all else: lists, dicts, classes that are registered with
``torch.utils._pytree``, and, of exported models, objects of any class. An exported graph reads data of its
objects, and calls none of their methods: so what they hold says what the graph gets.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from backquant.graph.objects import attributes, is_object

_PLAIN = (int, float, bool, str, type(None))
_NAMED = (torch.dtype, torch.device, type, enum.Enum)
_TENSORS = (torch.Tensor, nn.Parameter)


class Arguments:
    """``tensors``: of the call, each once, in order. ``kind``: equal for calls like each other; ``None`` for
    those that are not replayed: with tensors of other classes or devices, or none, or objects where
    ``takes_objects`` is false.

    >>> x = torch.ones(2)
    >>> one, other = Arguments((x, [x, -x]), {}), Arguments((-x, [x, x]), {})
    >>> len(one.tensors), one.kind == other.kind, one.kind == Arguments((x + x, [-x, x]), {}).kind
    (2, False, False)
    >>> Arguments((x, object()), {}).kind is None
    True
    """

    def __init__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, takes_objects: bool = False
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        self.kind: Hashable | None
        if not kwargs and len(args) == 1 and type(args[0]) is torch.Tensor:  # the usual call
            self.tensors.append(args[0])
            self.kind = layout(args[0])
            return
        self._takes_objects = takes_objects
        self._places: dict[int, int] = {}
        # ids of the objects around the current value, to stop at cycles
        self._above: list[int] = []
        found: list[Hashable] = [(len(args), *kwargs)]
        self._found = found
        for value in args:
            self._visit(value)
        for value in kwargs.values():
            self._visit(value)
        self.kind = tuple(found) if self.tensors and None not in found else None

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if kind in _TENSORS:
            self._found.append(self._tensor(value))
        elif isinstance(value, _PLAIN):
            # 0.0 == -0.0, but results may differ
            self._found.append((kind, value) if value != 0.0 else (kind, str(value)))
        elif kind in (list, tuple) or (isinstance(value, tuple) and hasattr(kind, "_fields")):
            self._parts((kind, len(value)), value)
        elif kind is dict:
            self._parts((kind, *value), value.values())
        elif kind in pytree.SUPPORTED_NODES:
            parts, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
            self._parts((kind, len(parts)), parts)
            self._visit(context)
        elif isinstance(value, _NAMED):
            self._found.append(value)
        elif self._takes_objects and is_object(value):
            self._object(value)
        else:
            self._found.append(None)

    def _tensor(self, tensor: torch.Tensor) -> Hashable | None:
        place = self._places.setdefault(id(tensor), len(self.tensors))
        if place < len(self.tensors):
            return place
        self.tensors.append(tensor)
        return layout(tensor)

    def _parts(self, head: Hashable, parts: Any) -> None:
        self._found.append(head)
        for part in parts:
            self._visit(part)

    def _object(self, value: Any) -> None:
        if id(value) in self._above:
            self._found.append(None)
            return
        self._above.append(id(value))
        held = attributes(value)
        self._parts((type(value), *held), held.values())
        self._above.pop()


def layout(tensor: torch.Tensor) -> Hashable | None:
    """The properties of a tensor that a recording depends on; ``None`` for a tensor that cannot be recorded.

    >>> layout(torch.ones(2, 3).T)
    (torch.float32, torch.Size([3, 2]), (1, 3), 0)
    """
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


# The aten overloads by which recorded calls show the memory of a tensor, or copy it.

_aten = torch.ops.aten

SET_STORAGE = _aten.set_.source_Storage_storage_offset
SET_TENSOR = _aten.set_.source_Tensor_storage_offset
SETS = (SET_STORAGE, SET_TENSOR)
AS_STRIDED = _aten.as_strided.default
CLONE = _aten.clone.default
DEQUANTIZE = _aten.dequantize.self
#: Makes a quantized tensor from plain integers.
COPY = _aten._make_per_tensor_quantized_tensor.default
#: A tensor without values.
BLANK = frozenset({_aten.empty.memory_format, _aten._empty_affine_quantized.default})
#: The result has the values of the argument.
COPIES = frozenset({CLONE, _aten.contiguous.default, _aten.detach.default, _aten.alias.default})
#: Operators without side effects; ``set_`` counts, since it is applied to new tensors only.
WITHOUT_EFFECT = frozenset({COPY, *SETS, AS_STRIDED, *BLANK})
#: Operators of recordings that are replaced where a recording becomes a graph.
REPLAYED_AS = {
    SET_STORAGE: SET_TENSOR,
    # Their schemas do not say that they return views. If a constant is computed ahead (a state of zeros),
    # writes to such a part would change it from call to call; these schemas say so.
    _aten._unsafe_view.default: _aten.view.default,
    _aten.unsafe_split.Tensor: _aten.split.Tensor,
    _aten.unsafe_split_with_sizes.default: _aten.split_with_sizes.default,
}
#: With a mask as index, the size of its result depends on values.
INDEX = _aten.index.Tensor
