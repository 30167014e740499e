"""What an observer found, as reference modules take it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backquant.dtypes import is_per_tensor
from backquant.observe.protocol import is_placeholder

__all__ = ["qparam_dict"]


def qparam_dict(observer: Any, calculated: tuple[Tensor, Tensor] | None = None) -> dict[str, Any]:
    """What a reference module needs of the observer of its weight.

    ``calculated``: what its ``calculate_qparams()`` would return, if that is known.

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
        result["axis"] = observer.ch_axis
    pair = observer.calculate_qparams() if calculated is None else calculated
    result["scale"], result["zero_point"] = pair
    for bound in ("quant_min", "quant_max"):
        if hasattr(observer, bound):
            result[bound] = getattr(observer, bound)
    return result
