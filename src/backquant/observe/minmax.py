"""MinMaxObserver: the range is the smallest and the largest value ever seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backquant.dtypes import is_per_tensor
from backquant.errors import ConfigError
from backquant.observe.base import EPS, UniformQuantizationObserverBase
from backquant.observe.ranges import finite_range


class MinMaxObserver(UniformQuantizationObserverBase):
    """Records the smallest and largest value; per tensor. Arguments as of the base class.

    Empty inputs, NaN and infinite values leave the range unchanged (PyTorch's would keep the
    NaN or the infinity, and with it a useless scale). Merging is exact.

    >>> observer = MinMaxObserver(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
    >>> _ = observer(torch.tensor([-1.0, 1.275]))
    >>> observer.calculate_qparams()
    (tensor([0.0100]), tensor([0]))
    """

    min_val: Tensor
    max_val: Tensor

    def __init__(  # the signature is PyTorch's
        self,
        dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_tensor_affine,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        factory_kwargs: dict[str, Any] | None = None,
        eps: float = EPS,
        is_dynamic: bool = False,
        **kwargs: Any,
    ) -> None:
        check_per_tensor(type(self).__name__, qscheme)
        super().__init__(
            dtype=dtype,
            qscheme=qscheme,
            reduce_range=reduce_range,
            quant_min=quant_min,
            quant_max=quant_max,
            factory_kwargs=factory_kwargs,
            eps=eps,
            is_dynamic=is_dynamic,
            **kwargs,
        )
        made = torch.nn.factory_kwargs(factory_kwargs)
        self.register_buffer("min_val", torch.tensor(float("inf"), **made))
        self.register_buffer("max_val", torch.tensor(float("-inf"), **made))
        check_reduced_symmetric(self)

    def forward(self, x: Tensor) -> Tensor:
        """Widen the range to hold ``x`` (any shape, any real dtype); returns ``x``."""
        low, high, ignored = finite_range(x.detach().to(self.min_val.dtype))
        self.ignored += ignored
        self.min_val.copy_(torch.minimum(self.min_val, low))
        self.max_val.copy_(torch.maximum(self.max_val, high))
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale (float32 ``[1]``) and zero point (``[1]``); 1 and 0, warned, before any data."""
        return self._calculate_qparams(self.min_val, self.max_val)

    def reset_min_max_vals(self) -> None:
        """Forget the range."""
        self.min_val.fill_(float("inf"))
        self.max_val.fill_(float("-inf"))

    def _absorb(self, other: MinMaxObserver) -> None:
        self.min_val.copy_(torch.minimum(self.min_val, other.min_val))
        self.max_val.copy_(torch.maximum(self.max_val, other.max_val))

    def extra_repr(self) -> str:
        return f"min_val={self.min_val}, max_val={self.max_val}"


def check_per_tensor(name: str, qscheme: torch.qscheme) -> None:
    """Raise ConfigError unless ``qscheme`` is a per-tensor one."""
    if not is_per_tensor(qscheme):
        raise ConfigError(
            f"{name} measures one range per tensor and was requested with {qscheme}",
            where=f"{name}(qscheme={qscheme})",
            fix="use torch.per_tensor_affine or torch.per_tensor_symmetric, "
            f"or {name.replace('MinMax', 'PerChannelMinMax')}",
        )


def check_reduced_symmetric(observer: UniformQuantizationObserverBase) -> None:
    """Raise ConfigError for quint8 with a symmetric scheme and a reduced range."""
    symmetric = observer.qscheme in (torch.per_tensor_symmetric, torch.per_channel_symmetric)
    if symmetric and observer.reduce_range and observer.dtype == torch.quint8:
        raise ConfigError(
            "quint8 has no symmetric reduced range: its zero point 128 lies outside of 0..127",
            where=f"{type(observer).__name__}(dtype=torch.quint8, reduce_range=True)",
            fix="use dtype=torch.qint8, or quant_min=0, quant_max=127",
        )
