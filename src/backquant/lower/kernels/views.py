"""Between plain integer tensors and torch's quantized tensors, which the ``quantized::`` kernels take.

A view shares the memory, sizes and strides (so channels-last stays channels-last). torch warns once
per process that quantized tensors are deprecated; the first one is made here, at import, so that
users of a lowered model do not see it.
"""

from __future__ import annotations

import warnings
from functools import lru_cache

import torch
from torch.storage import TypedStorage

__all__ = ["as_quantized", "integer_view", "quantized_view"]

_TOKEN = {torch.uint8: torch.quint8, torch.int8: torch.qint8, torch.int32: torch.qint32}
_STORAGE = {token: storage for storage, token in _TOKEN.items()}

# Below this many elements a copy takes less time than making a view.
_COPY_BELOW = 1 << 17


@lru_cache(maxsize=4096)
def _empty(scale: float, zero_point: int, token: torch.dtype) -> torch.Tensor:
    return torch._empty_affine_quantized((0,), scale=scale, zero_point=zero_point, dtype=token)


def as_quantized(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """``x`` (uint8 or int8) as a quantized tensor that is only read: a copy of a small tensor, a
    view of a large one. The memory format is kept.

    >>> as_quantized(torch.tensor([10, 12], dtype=torch.uint8), 0.5, 10).dequantize()
    tensor([0., 1.])
    """
    if x.numel() < _COPY_BELOW:
        return torch._make_per_tensor_quantized_tensor(x, scale, zero_point)
    return quantized_view(x, scale, zero_point)


def quantized_view(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """``x`` (uint8, int8 or int32, any strides) as a quantized tensor; the memory is shared.

    >>> x = torch.tensor([10, 12], dtype=torch.uint8)
    >>> q = quantized_view(x, 0.5, 10)
    >>> q.dequantize(), q.data_ptr() == x.data_ptr()
    (tensor([0., 1.]), True)
    """
    token = _TOKEN[x.dtype]
    view = torch.empty_quantized((0,), _empty(scale, zero_point, token))
    storage = TypedStorage(wrap_storage=x.untyped_storage(), dtype=token, _internal=True)
    return view.set_(storage, x.storage_offset(), x.size(), x.stride())


def integer_view(q: torch.Tensor) -> torch.Tensor:
    """The integers of a quantized tensor; the memory is shared.

    >>> integer_view(quantized_view(torch.tensor([7], dtype=torch.int8), 0.5, 0))
    tensor([7], dtype=torch.int8)
    """
    plain = torch.empty(0, dtype=_STORAGE[q.dtype])
    return plain.set_(q.untyped_storage(), q.storage_offset(), q.size(), q.stride())


def _spend_the_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _empty(1.0, 0, torch.quint8)


_spend_the_warning()
