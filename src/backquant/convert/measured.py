"""What one observer found, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from backquant.dtypes import is_per_channel, storage_dtype
from backquant.errors import BackquantError, ConfigError
from backquant.observe import is_noop, is_placeholder

__all__ = ["Measured", "measure"]


_Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Measured:
    """The qparams of one observer.

    ``scale`` (float32) and ``zero_point`` (integer) are None where nothing is measured before
    inference: dynamic quantization and float16. ``axis`` is None per tensor. ``dtype`` is the token
    (``torch.quint8``), ``storage`` the plain dtype (``torch.uint8``).
    """

    dtype: torch.dtype
    scale: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None
    axis: int | None = None
    quant_min: int = 0
    quant_max: int = 0
    is_dynamic: bool = False
    qscheme: Any = None
    eps: float = 0.0

    @property
    def storage(self) -> torch.dtype:
        """The dtype of the tensor that holds the quantized values."""
        return storage_dtype(self.dtype)

    @property
    def scalar_scale(self) -> float:
        """The scale of a per-tensor observer."""
        assert self.scale is not None
        return float(self.scale)

    @property
    def scalar_zero_point(self) -> int:
        """The zero point of a per-tensor observer."""
        assert self.zero_point is not None
        return int(self.zero_point)


def measure(observer: Any, calculated: _Pair | None = None) -> Measured:
    """The qparams of an observer or fake-quantizer, ours or by protocol.

    ``calculated``: what its ``calculate_qparams()`` would return, if that is known.

    >>> from backquant.observe import MinMaxObserver
    >>> observer = MinMaxObserver()
    >>> _ = observer(torch.tensor([0.0, 2.55]))
    >>> found = measure(observer)
    >>> round(found.scalar_scale, 4), found.scalar_zero_point, found.quant_max, found.storage
    (0.01, 0, 255, torch.uint8)
    """
    dtype: torch.dtype = observer.dtype
    dynamic = bool(getattr(observer, "is_dynamic", False))
    qscheme = getattr(observer, "qscheme", None)
    # observers of others may do without a qscheme: then there is one scale
    unmeasured = qscheme is None and (dtype.is_floating_point or is_noop(observer))
    if dynamic or dtype == torch.float16 or unmeasured or is_placeholder(observer):
        return Measured(
            dtype,
            quant_min=_bound(observer, "quant_min"),
            quant_max=_bound(observer, "quant_max"),
            is_dynamic=dynamic,
            qscheme=qscheme,
            eps=float(getattr(observer, "eps", torch.finfo(torch.float32).eps)),
        )
    scale, zero_point = _calculated(observer) if calculated is None else calculated
    return Measured(
        dtype,
        scale=scale.detach().clone(),
        zero_point=zero_point.detach().clone(),
        axis=int(observer.ch_axis) if qscheme is not None and is_per_channel(qscheme) else None,
        quant_min=_bound(observer, "quant_min"),
        quant_max=_bound(observer, "quant_max"),
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


def _bound(observer: Any, name: str) -> int:
    """A bound; that of the dtype where the observer has none (placeholders)."""
    value = getattr(observer, name, None)
    if value is not None:
        return int(value)
    if observer.dtype.is_floating_point:
        return 0
    limits = torch.iinfo(storage_dtype(observer.dtype))
    return int(limits.min if name == "quant_min" else limits.max)
