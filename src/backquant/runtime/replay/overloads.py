"""The aten overloads by which recorded calls show the memory of a tensor, or copy it."""

from __future__ import annotations

import torch

_aten = torch.ops.aten

SET_STORAGE = _aten.set_.source_Storage_storage_offset
SET_TENSOR = _aten.set_.source_Tensor_storage_offset
SETS = (SET_STORAGE, SET_TENSOR)
AS_STRIDED = _aten.as_strided.default
#: From plain integers to a quantized tensor.
COPY = _aten._make_per_tensor_quantized_tensor.default
#: Without an effect beside their result; ``set_`` is applied to tensors that were made for it.
WITHOUT_EFFECT = frozenset(
    {COPY, *SETS, AS_STRIDED, _aten._empty_affine_quantized.default, _aten.empty.memory_format}
)
#: What a recording shows, and what the interpreter is given in its place.
REPLAYED_AS = {
    SET_STORAGE: SET_TENSOR,
    # The same views by operators whose schemas say so: parts of a constant that is computed once
    # (a state of zeros) would be written to by what follows, call after call.
    _aten._unsafe_view.default: _aten.view.default,
    _aten.unsafe_split.Tensor: _aten.split.Tensor,
    _aten.unsafe_split_with_sizes.default: _aten.split_with_sizes.default,
}
#: Its result has as many values as its index says, where that is a mask.
INDEX = _aten.index.Tensor
