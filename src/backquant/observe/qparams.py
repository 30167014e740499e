"""What an observer found: as data, and as reference modules take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backquant.dtypes import (
    Granularity,
    ObservedQParams,
    find_dtype,
    is_narrow_float,
    is_per_channel,
    is_per_tensor,
)
from backquant.errors import BackquantError, ConfigError
from backquant.observe.protocol import is_noop, is_placeholder

_Pair = tuple[Tensor, Tensor]
_BLOCKS = ("per_group", "per_block")


def qparam_dict(observer: Any, calculated: _Pair | None = None) -> dict[str, Any]:
    """The qparams that a reference module needs, from the observer of its weight.

    ``calculated``: the result of its ``calculate_qparams()``, if that is known already.

    Keys: ``qscheme`` (affine; None when the observer has none or measures nothing), ``dtype``,
    and then ``scale``, ``zero_point``, ``axis`` (per channel), ``quant_min``, ``quant_max``.

    >>> from backquant.observe import default_weight_observer
    >>> observer = default_weight_observer()
    >>> _ = observer(torch.tensor([-1.0, 1.275]))
    >>> sorted(qparam_dict(observer))
    ['dtype', 'qscheme', 'quant_max', 'quant_min', 'scale', 'zero_point']
    """
    qscheme = getattr(observer, "qscheme", None)
    if qscheme is None or is_placeholder(observer):
        return {"qscheme": None, "dtype": observer.dtype}
    result: dict[str, Any] = {"dtype": observer.dtype}
    if is_per_tensor(qscheme):
        result["qscheme"] = torch.per_tensor_affine
    else:
        symmetric = qscheme == torch.per_channel_symmetric
        result["qscheme"] = torch.per_channel_affine if symmetric else qscheme
        if not getattr(observer, "granularity", ""):
            result["axis"] = observer.ch_axis
    pair = observer.calculate_qparams() if calculated is None else calculated
    result["scale"], result["zero_point"] = pair
    for bound in ("quant_min", "quant_max"):
        if hasattr(observer, bound):
            result[bound] = getattr(observer, bound)
    return result


def measure(observer: Any, calculated: _Pair | None = None) -> ObservedQParams:
    """The qparams of an observer or fake-quantizer, ours or by protocol.

    ``calculated``: what its ``calculate_qparams()`` would return, if that is known.

    >>> from backquant.observe import MinMaxObserver
    >>> observer = MinMaxObserver()
    >>> _ = observer(torch.tensor([0.0, 2.55]))
    >>> found = measure(observer)
    >>> round(found.number.scale, 4), found.number.zero_point, found.quant_max, found.storage
    (0.01, 0, 255, torch.uint8)
    """
    dtype: torch.dtype = observer.dtype
    dynamic = bool(getattr(observer, "is_dynamic", False))
    qscheme = getattr(observer, "qscheme", None)
    # observers of others may do without a qscheme: then there is one scale
    unmeasured = qscheme is None and (dtype.is_floating_point or is_noop(observer))
    if dynamic or is_narrow_float(dtype) or unmeasured or is_placeholder(observer):
        shared = str(getattr(observer, "granularity", ""))
        return ObservedQParams(
            None,
            None,
            *_bounds(observer),
            dtype,
            is_dynamic=dynamic,
            qscheme=qscheme,
            eps=float(getattr(observer, "eps", torch.finfo(torch.float32).eps)),
            per_token=shared == "per_token",
            groups=Granularity.parse(shared) if shared.startswith(_BLOCKS) else None,
        )
    scale, zero_point = _calculated(observer) if calculated is None else calculated
    return ObservedQParams(
        scale.detach().clone(),
        zero_point.detach().clone(),
        *_bounds(observer),
        dtype,
        axis=None if scale.dim() > 1 or not is_per_channel(qscheme) else int(observer.ch_axis),
        qscheme=qscheme,
    )


def _calculated(observer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    name = type(observer).__name__
    try:
        scale, zero_point = observer.calculate_qparams()
        return torch.as_tensor(scale), torch.as_tensor(zero_point)
    except BackquantError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name}.calculate_qparams raised {type(error).__name__}: {error}",
            where=name,
            fix="calculate_qparams() -> (scale, zero_point), two tensors",
        ) from error


def _bounds(observer: Any) -> tuple[int, int]:
    """The range; that of the dtype where the observer has none (placeholders)."""
    low, high = getattr(observer, "quant_min", None), getattr(observer, "quant_max", None)
    row = find_dtype(observer.dtype)
    own = (row.low, row.high) if row is not None and row.has_scale else (0, 0)
    return int(own[0] if low is None else low), int(own[1] if high is None else high)


# Buffers whose length is known after the first batch only.


def with_shape(buffer: Tensor, shape: Sequence[int]) -> Tensor:
    """``buffer`` itself, of this shape; where that changes it, its values are undefined afterwards.

    Memory is exchanged and not resized: what ``torch.load`` returns cannot be resized, and a tensor
    that failed to be points behind its memory.

    >>> import torch
    >>> buffer = torch.tensor([])
    >>> with_shape(buffer, (3,)) is buffer, buffer.shape
    (True, torch.Size([3]))
    """
    return buffer if buffer.shape == tuple(shape) else buffer.set_(buffer.new_empty(shape))  # type: ignore[call-overload]
