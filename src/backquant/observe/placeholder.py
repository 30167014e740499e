"""Observers that measure nothing: they carry a dtype, a wish, or a recording."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import torch
from torch import Tensor

from backquant.dtypes import Granularity
from backquant.errors import ConfigError
from backquant.observe.base import EPS, ObserverBase


class PlaceholderObserver(ObserverBase):
    """Carries a dtype to the conversion: float dtypes, and ranges measured at inference.

    Arguments are those of PyTorch's class; ``compute_dtype`` is its deprecated spelling of ``is_dynamic``.
    With ``granularity="per_token"`` each call computes one scale for every slice along the last axis; with
    ``"per_group(size=32)"`` or ``"per_block(shape=[1, 16])"`` one for each group or block, with zero point 0.

    >>> PlaceholderObserver(dtype=torch.float16)
    PlaceholderObserver(dtype=torch.float16, is_dynamic=False)
    """

    def __init__(  # what stands before the * is PyTorch's signature
        self,
        dtype: torch.dtype = torch.float32,
        custom_op_name: str = "",
        compute_dtype: torch.dtype | None = None,
        quant_min: int | None = None,
        quant_max: int | None = None,
        qscheme: torch.qscheme | None = None,
        eps: float | None = None,
        is_dynamic: bool = False,
        *,
        granularity: str | None = None,
    ) -> None:
        super().__init__(dtype=dtype, is_dynamic=is_dynamic)
        self.granularity = _at_each_call(granularity)
        in_blocks = self.granularity not in ("", "per_token")
        usual = torch.per_tensor_symmetric if in_blocks else torch.per_tensor_affine
        self.qscheme = usual if qscheme is None else qscheme
        self.quant_min = quant_min
        self.quant_max = quant_max
        self.eps = EPS if eps is None else eps
        self.custom_op = custom_op_name
        if compute_dtype is not None:
            self.is_dynamic = True
            warnings.warn(
                "compute_dtype is deprecated: pass dtype and is_dynamic=True",
                category=FutureWarning,
                stacklevel=2,
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``; nothing is recorded."""
        return x

    def calculate_qparams(self) -> NoReturn:
        """Always raises ConfigError: nothing was measured."""
        raise _measures_nothing(self)

    def _absorb(self, other: PlaceholderObserver) -> None:
        """There is no state."""

    def extra_repr(self) -> str:
        return f"dtype={self.dtype}, is_dynamic={self.is_dynamic}"


def _at_each_call(granularity: str | None) -> str:
    """The one spelling of a granularity of values that are quantized at each call; empty: per tensor."""
    shared = Granularity("per_tensor") if granularity is None else Granularity.parse(granularity)
    sized = shared.size is not None or shared.shape is not None
    if shared.kind not in ("per_tensor", "per_token") and not (shared.has_blocks and sized):
        raise ConfigError(
            f"no operator quantizes at each call {granularity}",
            where=f"PlaceholderObserver(granularity={granularity!r})",
            fix='granularity="per_token", "per_group(size=32)", or "per_tensor"',
        )
    return "" if shared.kind == "per_tensor" else str(shared)


class NoopObserver(ObserverBase):
    """Carries a dtype; nothing is observed.

    >>> NoopObserver().dtype
    torch.float16
    """

    def __init__(self, dtype: torch.dtype = torch.float16, custom_op_name: str = "") -> None:
        super().__init__(dtype=dtype, is_dynamic=False)
        self.custom_op = custom_op_name

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``; nothing is recorded."""
        return x

    def calculate_qparams(self) -> NoReturn:
        """Always raises ConfigError: nothing was measured."""
        raise _measures_nothing(self)

    def _absorb(self, other: NoopObserver) -> None:
        """There is no state."""


class ReuseInputObserver(ObserverBase):
    """Asks that the output shares the observer of the operator's input (for reshape and the like).

    If the input is not observed, neither is the output.

    >>> ReuseInputObserver().dtype
    torch.quint8
    """

    def __init__(self) -> None:
        super().__init__(torch.quint8, is_dynamic=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``; nothing is recorded."""
        return x

    def calculate_qparams(self) -> NoReturn:
        """Always raises ConfigError: nothing was measured."""
        raise _measures_nothing(self)

    def _absorb(self, other: ReuseInputObserver) -> None:
        """There is no state."""


class RecordingObserver(ObserverBase):
    """Keeps a copy of every tensor it sees, for debugging.

    >>> observer = RecordingObserver()
    >>> _ = observer(torch.tensor([1.0]))
    >>> observer.get_tensor_value()
    [tensor([1.])]
    """

    def __init__(self, dtype: torch.dtype = torch.quint8) -> None:
        super().__init__(dtype=dtype, is_dynamic=False)
        self.tensor_val: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Keep a detached copy of ``x``; returns ``x``."""
        self.tensor_val.append(x.detach().clone())
        return x

    def get_tensor_value(self) -> list[Tensor]:
        """The recorded tensors, in order."""
        return self.tensor_val

    def calculate_qparams(self) -> NoReturn:
        """Always raises ConfigError: recordings are for people."""
        raise _measures_nothing(self)

    def merge(self, other: ObserverBase) -> Any:  # noqa: ARG002
        """Always raises ConfigError: a recording is a sequence, which depends on order."""
        raise ConfigError(
            "RecordingObserver cannot be merged: a recording depends on the order of the batches",
            where="RecordingObserver.merge",
            fix="join the lists of get_tensor_value() in the order you want",
        )


def _measures_nothing(observer: ObserverBase) -> ConfigError:
    name = type(observer).__name__
    return ConfigError(
        f"{name} measures nothing, so it has no scale and zero point",
        where=f"{name}.calculate_qparams()",
        fix="use MinMaxObserver or HistogramObserver to measure a range",
    )


# FixedQParamsObserver: scale and zero point are given, not measured.


class FixedQParamsObserver(ObserverBase):
    """Has fixed qparams, for operators whose output range is known, such as sigmoid (0 to 1). Per
    tensor.

    Arguments are those of PyTorch's class. Raises ConfigError for ``is_dynamic=True``.

    >>> FixedQParamsObserver(scale=1 / 256, zero_point=0).calculate_qparams()
    (tensor([0.0039]), tensor([0], dtype=torch.int32))
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(  # the signature is PyTorch's
        self,
        scale: float,
        zero_point: int,
        dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_tensor_affine,
        quant_min: int = 0,
        quant_max: int = 255,
        is_dynamic: bool = False,
        **kwargs: Any,
    ) -> None:
        if is_dynamic:
            raise ConfigError(
                "fixed qparams cannot be measured at inference",
                where="FixedQParamsObserver(is_dynamic=True)",
                fix="leave is_dynamic=False",
            )
        super().__init__(dtype=dtype, is_dynamic=is_dynamic, **kwargs)
        self.quant_min = quant_min
        self.quant_max = quant_max
        self.qscheme = qscheme
        self.register_buffer("scale", torch.tensor([scale], dtype=torch.float))
        self.register_buffer("zero_point", torch.tensor([zero_point], dtype=torch.int))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``; nothing is recorded."""
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """The given scale (float32 ``[1]``) and zero point (int32 ``[1]``)."""
        return self.scale, self.zero_point

    def _merge_settings(self) -> dict[str, Any]:
        return {
            **super()._merge_settings(),
            "qscheme": self.qscheme,
            "quant_min": self.quant_min,
            "quant_max": self.quant_max,
            "scale": self.scale.tolist(),
            "zero_point": self.zero_point.tolist(),
        }

    def _absorb(self, other: FixedQParamsObserver) -> None:
        """Equal settings are all there is."""

    def extra_repr(self) -> str:
        return f"scale={self.scale.item()}, zero_point={self.zero_point.item()}"
