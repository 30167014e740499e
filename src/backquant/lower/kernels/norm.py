"""Normalisations on plain integer tensors, by the ``quantized::`` kernels; batch norms of images by the
library of kernels, where it is here.

Batch norm applies stored statistics; layer, group and instance norm measure theirs on the integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from backquant.lower.kernels.configured import KernelModule, decode_config
from backquant.lower.kernels.images import rescaled
from backquant.lower.kernels.views import as_quantized_image, integer_view
from backquant.native.library import is_here
from backquant.native.packing import by_channel


@dataclass(frozen=True)
class BatchNormConfig:
    """``dims``: 1, 2 or 3 spatial dimensions."""

    dims: int
    eps: float
    relu: bool
    x_scale: float
    x_zero_point: int
    out_scale: float
    out_zero_point: int


class BatchNorm(KernelModule):
    """``quantized::batch_norm{1,2,3}d`` and ``..._relu`` with stored statistics.

    Takes 8-bit integers ``[batch, channels, ...]`` and returns the same shape, channels last. The
    four tensors are float32 ``[channels]``.

    >>> config = BatchNormConfig(2, 0.0, False, 0.5, 10, 1.0, 0)
    >>> one, zero = torch.ones(1), torch.zeros(1)
    >>> kernel = BatchNorm(config, {"weight": one, "bias": zero, "mean": -one, "var": one})
    >>> kernel(torch.full((1, 1, 1, 1), 14, dtype=torch.uint8)).item()  # (14 - 10) * 0.5 + 1
    3
    """

    config_class = BatchNormConfig
    config: BatchNormConfig
    weight: torch.Tensor
    bias: torch.Tensor
    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self, config: BatchNormConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.config = config
        for name in ("weight", "bias", "mean", "var"):
            self.register_buffer(name, tensors[name].detach().float())
        self._numbers: torch.Tensor | None = None

    @property
    def name(self) -> str:
        family = "backquant" if self._is_planned else "quantized"
        return f"{family}.batch_norm{self.config.dims}d" + ("_relu" if self.config.relu else "")

    @property
    def _is_planned(self) -> bool:
        """Whether the library of kernels computes it, on images of more than one pixel."""
        return self.config.dims == 2 and is_here()

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        return () if self._numbers is None else (self._numbers,)

    def _derived(self) -> dict[str, Any]:
        return {"_numbers": None}

    def scaled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``scale`` and ``shift`` by channel: what integers of the input are times and plus in the result.

        >>> config = BatchNormConfig(2, 0.0, False, 0.5, 10, 1.0, 0)
        >>> one = torch.ones(1)
        >>> BatchNorm(config, {"weight": one, "bias": 0 * one, "mean": -one, "var": one}).scaled()
        (tensor([0.5000]), tensor([-4.]))
        """
        c = self.config
        factor = self.weight.double() / (self.var.double() + c.eps).sqrt()
        scale = factor * (c.x_scale / c.out_scale)
        shift = (self.bias.double() - self.mean.double() * factor) / c.out_scale
        shift = shift - scale * c.x_zero_point + c.out_zero_point
        return scale.float(), shift.float()

    def _scaled(self) -> torch.Tensor:
        """As the library reads them; made once."""
        if self._numbers is None:
            self._numbers = torch.cat([by_channel(values) for values in self.scaled()])
        return self._numbers

    @classmethod
    def from_artifact(
        cls, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> BatchNorm:
        """Inverse of ``artifact_config()`` and the buffers."""
        return cls(decode_config(BatchNormConfig, config), tensors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """8-bit integers to 8-bit integers of the same shape."""
        c = self.config
        if self._is_planned:
            found = rescaled(x, self._scaled(), c.out_zero_point if c.relu else 0)
            if found is not None:
                return found
        torch_name = f"batch_norm{c.dims}d" + ("_relu" if c.relu else "")
        kernel = getattr(torch.ops.quantized, torch_name)
        q = kernel(
            as_quantized_image(x, c.x_scale, c.x_zero_point),
            self.weight,
            self.bias,
            self.mean,
            self.var,
            c.eps,
            c.out_scale,
            c.out_zero_point,
        )
        return integer_view(q)


@dataclass(frozen=True)
class NormConfig:
    """``kind``: layer, group or instance. ``size``: the normalized shape of a layer norm, the number
    of groups of a group norm, nothing for an instance norm."""

    kind: str
    size: tuple[int, ...]
    eps: float
    x_scale: float
    x_zero_point: int
    out_scale: float
    out_zero_point: int

    @property
    def measured(self) -> tuple[float, float]:
        """The scale and eps to measure with. Where all values of a row are equal, what float32 rounds of
        large ones is divided by the root of eps: a norm of the integers and an eps in their steps is the
        same, and exact there.

        >>> NormConfig("layer", (2,), 1.0, 4.0, 0, 0.5, 10).measured
        (1.0, 0.0625)
        """
        return (1.0, self.eps / self.x_scale**2) if self.x_scale > 1 else (self.x_scale, self.eps)


class Norm(KernelModule):
    """``quantized::layer_norm``, ``quantized::group_norm`` or ``quantized::instance_norm``.

    Takes 8-bit integers and returns the same shape. ``weight`` and ``bias`` are float32, or None.

    >>> kernel = Norm(NormConfig("layer", (2,), 0.0, 1.0, 0, 0.5, 10), None, None)
    >>> kernel(torch.tensor([[3, 5]], dtype=torch.uint8))  # -1 and 1
    tensor([[ 8, 12]], dtype=torch.uint8)
    """

    config_class = NormConfig
    config: NormConfig
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(
        self, config: NormConfig, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("weight", None if weight is None else weight.detach().float())
        self.register_buffer("bias", None if bias is None else bias.detach().float())

    @property
    def name(self) -> str:
        return f"quantized.{self.config.kind}_norm"

    @classmethod
    def from_artifact(
        cls, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor | None]
    ) -> Norm:
        """Inverse of ``artifact_config()`` and the buffers."""
        made = decode_config(NormConfig, config)
        return cls(made, tensors.get("weight"), tensors.get("bias"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """8-bit integers to 8-bit integers of the same shape."""
        if not x.numel():  # some kernels divide by the number of values
            return self._in_float(x).to(x.dtype)
        c = self.config
        scale, eps = c.measured
        rows = self._as_rows(x)
        q = as_quantized_image(rows, scale, c.x_zero_point)
        rest = (self.weight, self.bias, eps, c.out_scale, c.out_zero_point)
        if c.kind == "layer":
            result = torch.ops.quantized.layer_norm(q, list(c.size), *rest)
        elif c.kind == "group":
            result = torch.ops.quantized.group_norm(q, c.size[0], *rest)
        else:
            result = torch.ops.quantized.instance_norm(q, *rest)
        return integer_view(result).view(x.shape) if rows is not x else integer_view(result)

    def _in_float(self, x: torch.Tensor) -> torch.Tensor:
        c, rest = self.config, (self.weight, self.bias, self.config.eps)
        if c.kind == "layer":
            return F.layer_norm(x.float(), c.size, *rest)
        if c.kind == "group":
            return F.group_norm(x.float(), c.size[0], *rest)
        return F.instance_norm(x.float(), weight=self.weight, bias=self.bias, eps=c.eps)

    def _as_rows(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, or ``[batch, channels, positions]``: where there are no positions, which the kernels want,
        and where the batch is larger than what one norm measures: the kernels for channels last keep their
        sums in a buffer of that length, and read beyond it."""
        if self.config.kind == "layer":
            return x
        if x.dim() < 4:
            return x.unsqueeze(-1) if x.dim() == 2 else x
        norms = self.config.size[0] if self.config.kind == "group" else x.shape[1]
        is_short = x.shape[0] * norms > x[:1].numel()
        return x.flatten(2).contiguous() if is_short else x
