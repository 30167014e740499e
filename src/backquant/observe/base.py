"""What every observer has: a dtype, ``calculate_qparams``, factories, and merging."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from backquant.dtypes import QuantRange, affine_qparams, is_quantized, known_dtypes, resolve_range
from backquant.errors import ConfigError
from backquant.observe.protocol import with_args, with_callable_args

EPS = torch.finfo(torch.float32).eps

_QSCHEMES = (
    torch.per_tensor_affine,
    torch.per_tensor_symmetric,
    torch.per_channel_affine,
    torch.per_channel_symmetric,
    torch.per_channel_affine_float_qparams,
)


class ObserverBase(ABC, nn.Module):
    """Base of observers. ``forward`` returns its input unchanged and may record it;
    ``calculate_qparams`` returns (scale, zero point).

    Args: ``dtype``: the quantized dtype asked for; ``is_dynamic``: whether the range is measured
    at inference instead.

    Invariant: ``forward`` with an empty tensor, or with values that are not finite, leaves the
    state as the remaining finite values alone would have left it; ``ignored`` counts what was left
    out (no part of the state dict).
    """

    ignored: int = 0

    with_args = classmethod(with_args)
    with_callable_args = classmethod(with_callable_args)

    def __init__(self, dtype: torch.dtype, is_dynamic: bool = False) -> None:
        super().__init__()
        self.dtype = dtype
        self.is_dynamic = is_dynamic

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Record ``x`` (any shape) and return it."""

    @abstractmethod
    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point for what was recorded."""

    def merge(self, other: ObserverBase) -> Self:
        """Take over what ``other`` recorded, as if this observer had seen it too; returns self.

        Exact, and independent of order: merging a to b or b to a gives the same state as one
        observer that saw all data. Raises ConfigError when the two are configured differently, or
        when the state depends on the order of batches (moving averages, recordings).

        >>> from backquant.observe import MinMaxObserver
        >>> a, b = MinMaxObserver(), MinMaxObserver()
        >>> _ = a(torch.tensor([0.0, 1.0])), b(torch.tensor([-2.0, 0.5]))
        >>> merged = a.merge(b)
        >>> merged.min_val.item(), merged.max_val.item()
        (-2.0, 1.0)
        """
        mine = self._merge_settings()
        theirs = other._merge_settings() if isinstance(other, ObserverBase) else {}
        if type(other) is not type(self) or mine != theirs:
            differing = [n for n in mine if mine[n] != theirs.get(n, object())]
            raise ConfigError(
                f"{type(self).__name__} cannot merge a {type(other).__name__} "
                "that is configured differently",
                where=", ".join(f"{n}: {mine[n]} and {theirs.get(n)}" for n in differing),
                fix="merge observers made by one factory",
            )
        self._absorb(other)
        self.ignored += other.ignored
        return self

    def _merge_settings(self) -> dict[str, Any]:
        """What must be equal in two observers to merge them."""
        return {"dtype": self.dtype, "is_dynamic": self.is_dynamic}

    def _absorb(self, other: Any) -> None:  # noqa: ARG002
        raise ConfigError(
            f"{type(self).__name__} does not define how to merge",
            where=f"{type(self).__name__}.merge",
            fix="define _absorb(self, other) in the class",
        )


class UniformQuantizationObserverBase(ObserverBase):
    """Base of observers that end in one affine range per tensor or per channel.

    Args (as PyTorch 2.13's class of this name):
        dtype: an 8-bit, 4-bit, 16-bit or 32-bit integer dtype, or a float8 one.
        qscheme: per tensor or per channel, affine or symmetric, or with float qparams.
        reduce_range: halve the range, for kernels that would overflow 16-bit sums.
        quant_min, quant_max: the range, when both are given; else the dtype's.
        factory_kwargs: ``device`` and ``dtype`` of the buffers.
        eps: the smallest scale.
        is_dynamic: whether the range is measured at inference.

    Raises ConfigError for a dtype, scheme or range that cannot be quantized to.
    """

    # 2: eps is a buffer; 3: per-channel buffers are min_val, max_val (were min_vals, max_vals).
    _version = 3

    eps: Tensor

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
        super().__init__(dtype=dtype, is_dynamic=is_dynamic, **kwargs)
        name = type(self).__name__
        if qscheme not in _QSCHEMES:
            raise ConfigError(
                f"{name} does not know the scheme {qscheme}",
                where=f"{name}(qscheme={qscheme})",
                fix="use one of " + ", ".join(str(known) for known in _QSCHEMES),
            )
        if not is_quantized(dtype):
            raise ConfigError(
                f"{name} cannot measure for {dtype}",
                where=f"{name}(dtype={dtype})",
                fix="use PlaceholderObserver.with_args(dtype=...) for float dtypes, or one of "
                + ", ".join(str(row.token) for row in known_dtypes() if row.has_scale),
            )
        self.qscheme = qscheme
        self.reduce_range = reduce_range
        made = torch.nn.factory_kwargs(factory_kwargs)
        self.register_buffer("eps", torch.tensor([eps], **made))
        self.has_customized_qrange = quant_min is not None and quant_max is not None
        self.quant_min, self.quant_max = resolve_range(dtype, quant_min, quant_max, reduce_range)

    def reset_min_max_vals(self) -> None:
        """Forget what was recorded. Raises ConfigError where the observer has no such state."""
        raise ConfigError(
            f"{type(self).__name__} cannot forget its range",
            where=f"{type(self).__name__}.reset_min_max_vals()",
            fix="make a new observer",
        )

    @property
    def quant_range(self) -> QuantRange:
        """The integer range and scheme, as one value."""
        return QuantRange(
            self.dtype, self.qscheme, self.quant_min, self.quant_max, self.has_customized_qrange
        )

    def _calculate_qparams(self, min_val: Tensor, max_val: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point; 1 and 0 with a warning when nothing was recorded."""
        nothing = min_val.numel() == 0 or max_val.numel() == 0
        if not nothing and min_val.dim() == 0:
            nothing = bool(min_val == float("inf")) and bool(max_val == float("-inf"))
        if nothing:
            return warn_not_run(self, min_val.device)
        unseen = min_val > max_val  # a channel that held no finite value
        if bool(unseen.any()):
            min_val, max_val = min_val.masked_fill(unseen, 0), max_val.masked_fill(unseen, 0)
        return affine_qparams(min_val, max_val, self.quant_range, self.eps)

    def _merge_settings(self) -> dict[str, Any]:
        names = ("qscheme", "quant_min", "quant_max", "ch_axis")
        own = {n: getattr(self, n, None) for n in names}
        return {**super()._merge_settings(), **own, "eps": self.eps.tolist()}

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        if (local_metadata.get("version") or 1) < 2:
            state_dict.setdefault(prefix + "eps", torch.tensor([EPS]))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def warn_not_run(observer: nn.Module, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale 1 and zero point 0 of an observer that saw no data, with a warning.

    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     warn_not_run(nn.Identity(), torch.device("cpu"))
    (tensor([1.]), tensor([0]))
    """
    warnings.warn(
        f"{type(observer).__name__} saw no data: its scale is 1 and its zero point 0. "
        "Run the prepared model on calibration data before conversion.",
        stacklevel=4,
    )
    return torch.tensor([1.0], device=device), torch.tensor([0], device=device)
