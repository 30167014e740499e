"""Linear layers on plain integer tensors by oneDNN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from backquant.lower.kernels.packed import PackedKernel, WeightTensors
from backquant.lower.kernels.postop import with_post_op
from backquant.lower.kernels.prepared import engine_for, is_plain
from backquant.lower.kernels.repacked import pack_linear
from backquant.lower.kernels.views import as_quantized, integer_view
from backquant.lower.kernels.zero_point import fold_zero_point

__all__ = ["LinearConfig", "OnednnLinear"]

_FEW = {"none": "linear", "relu": "linear_relu"}


@dataclass(frozen=True)
class LinearConfig:
    """All numbers of one linear layer. ``out_dtype`` float32 gives a float result (scale 1, zero
    point 0). ``rounds_once``: the reference model rounds before the post-op, too."""

    x_scale: float
    x_zero_point: int
    out_scale: float
    out_zero_point: int
    out_dtype: torch.dtype
    post_op: str = "none"
    post_numbers: tuple[float, ...] = ()
    post_algorithm: str = ""
    rounds_once: bool = False


class OnednnLinear(PackedKernel):
    """``onednn::qlinear_pointwise``: linear layer, bias and one unary operator. A few rows with ReLU or
    nothing behind go to fbgemm (``backquant.lower.kernels.prepared``).

    Takes uint8 ``[..., in]`` and returns ``[..., out]`` of ``config.out_dtype``. The weight is int8
    ``[out, in]`` with zero points 0.

    >>> config = LinearConfig(0.5, 10, 1.0, 0, torch.float32)
    >>> one = torch.ones(1, 2, dtype=torch.int8)
    >>> tensors = WeightTensors(one, torch.ones(1), torch.zeros(1, dtype=torch.int64), None)
    >>> OnednnLinear(config, tensors)(torch.tensor([[11, 12]], dtype=torch.uint8))
    tensor([[1.5000]])
    """

    config_class = LinearConfig
    kernel = "onednn.qlinear_pointwise"
    config: LinearConfig

    def __init__(self, config: LinearConfig, tensors: WeightTensors) -> None:
        super().__init__(config, tensors)
        c = config
        is_integer = c.out_dtype == torch.uint8
        self._few_name = _FEW.get(c.post_op, "") if is_integer else ""
        self._packed_few: Any = None
        self._out = (
            c.out_scale,
            c.out_zero_point,
            c.out_dtype,
            c.post_op,
            list(c.post_numbers),
            c.post_algorithm,
        )

    def _few(self, x: torch.Tensor) -> torch.Tensor:
        """A few rows, by ``quantized::linear``."""
        c = self.config
        if self._packed_few is None:
            scale, zeros = self.weight_scale, self.weight_zero_point
            self._packed_few = pack_linear("fbgemm", self.weight, scale, zeros, self.bias)
        operator = getattr(torch.ops.quantized, self._few_name).default
        q = as_quantized(x, c.x_scale, c.x_zero_point)
        return integer_view(operator(q, self._packed_few, c.out_scale, c.out_zero_point))

    def _drop(self) -> None:
        super()._drop()
        self._packed_few = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_packed_few": None}

    @property
    def name(self) -> str:
        return with_post_op(self.kernel, self.config.post_op, self.config.rounds_once)

    def _pack(self, size: tuple[int, ...]) -> Any:  # noqa: ARG002 - one layout suits all sizes
        c = self.config
        weight = torch.ops.onednn.qlinear_prepack(self.weight.contiguous(), None)
        zero_point = c.x_zero_point
        bias = fold_zero_point(self.weight, self.weight_scale, self.bias, c.x_scale, zero_point)
        return weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """uint8 ``[..., in]`` to ``[..., out]``."""
        if not x.numel():  # the operator would give a matrix
            shape = (*x.shape[:-1], self.weight.shape[0])
            return torch.empty(shape, dtype=self.config.out_dtype)
        if self._few_name and is_plain(x) and engine_for(x.numel() // x.shape[-1]) == "fbgemm":
            return self._few(x)
        weight, bias = self.packed_for(())
        out: torch.Tensor = torch.ops.onednn.qlinear_pointwise.default(
            x,
            self.config.x_scale,
            0,  # the zero point is in the bias
            weight,
            self.weight_scale,
            self.weight_zero_point,
            bias,
            *self._out,
        )
        return out
