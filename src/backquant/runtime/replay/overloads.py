"""The aten overloads by which recorded calls show the memory of a tensor, or copy it."""

from __future__ import annotations

import torch

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
