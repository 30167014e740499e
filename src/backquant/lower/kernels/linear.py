"""Linear layers on plain integer tensors by oneDNN."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from backquant.lower.kernels.packed import PACKINGS, PackedKernel, WeightTensors
from backquant.lower.kernels.planned import Planned
from backquant.lower.kernels.postop import with_post_op
from backquant.lower.kernels.prepared import engine_for, is_plain
from backquant.lower.kernels.repacked import pack_linear
from backquant.lower.kernels.self_check import folds_zero_exactly
from backquant.lower.kernels.views import as_quantized, integer_view
from backquant.lower.kernels.zero_point import fold_zero_point, rounds_within
from backquant.native.plan import Result, Shape

# Operators of torch by post-op: on quantized tensors, and from floats to floats (by fbgemm).
_INTEGER = {"none": "linear", "relu": "linear_relu"}
_FLOAT = {
    "none": "linear_with_input_q_dq_qweight_dq_output_fp32",
    "relu": "linear_with_input_q_dq_qweight_dq_relu_output_fp32",
}


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
    """``onednn::qlinear_pointwise``: linear layer, bias and one unary operator.

    With ReLU or nothing behind, a small product goes to fbgemm, and a large one that gives integers to
    primitives that are kept, for the first few shapes (``backquant.lower.kernels.prepared``).

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
        self._is_integer = c.out_dtype == torch.uint8
        self._prepared_name = (_INTEGER if self._is_integer else _FLOAT).get(c.post_op, "")
        self._prepared: dict[tuple[int, ...], Any] = {}
        is_precise = c.out_dtype.itemsize > 1 or rounds_within(
            self.weight, self.weight_scale, c.x_scale, c.x_zero_point, c.out_scale
        )
        is_folded = is_precise and (c.out_dtype.itemsize == 1 or folds_zero_exactly())
        self._zero_points = (c.x_zero_point, 0) if is_folded else (0, c.x_zero_point)
        post_op = (c.post_op, c.post_numbers, c.post_algorithm)
        self._planned = Planned(
            0,
            Shape((*tensors.weight.shape, 1, 1)),
            (c.x_scale, c.x_zero_point),
            Result(c.out_scale, c.out_zero_point, c.out_dtype, *post_op),
        )
        self._planned.is_precise = is_precise
        self._out = (
            c.out_scale,
            c.out_zero_point,
            c.out_dtype,
            c.post_op,
            list(c.post_numbers),
            c.post_algorithm,
        )

    def _prepared_for(self, shape: tuple[int, ...]) -> Any:
        """The object that runs ``_prepared_name`` for inputs of ``shape``; None if there is none, or for
        too many shapes already. fbgemm's serves all of them."""
        rows = math.prod(shape[:-1])
        engine = engine_for(rows, rows * self.weight.numel())
        if engine != "fbgemm" and not self._is_integer:
            return None
        key = () if engine == "fbgemm" else shape
        found = self._prepared.get(key)
        if found is None and (not key or len(self._prepared) < PACKINGS):
            scale, zeros = self.weight_scale, self.weight_zero_point
            found = pack_linear(engine, self.weight, scale, zeros, self.bias)
            self._prepared[key] = found
        return found

    def _by_prepared(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        c = self.config
        operator = getattr(torch.ops.quantized, self._prepared_name).default
        q = as_quantized(x, c.x_scale, c.x_zero_point)
        if self._is_integer:
            return integer_view(operator(q, prepared, c.out_scale, c.out_zero_point))
        found: torch.Tensor = operator(q.dequantize(), c.x_scale, c.x_zero_point, prepared)
        return found

    def _drop(self) -> None:
        super()._drop()
        self._planned.drop()

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        yield from super().packed_tensors()
        yield from self._planned.tensors

    def _derived(self) -> dict[str, Any]:
        return {**super()._derived(), "_prepared": {}}

    @property
    def name(self) -> str:
        kernel = self._planned.named(self.kernel)
        return with_post_op(kernel, self.config.post_op, self.config.rounds_once)

    def _pack(self, size: tuple[int, ...]) -> Any:  # noqa: ARG002 - one layout suits all sizes
        c = self.config
        weight = torch.ops.onednn.qlinear_prepack(self.weight.contiguous(), None)
        folded, _ = self._zero_points
        bias = fold_zero_point(self.weight, self.weight_scale, self.bias, c.x_scale, folded)
        return weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """uint8 ``[..., in]`` to ``[..., out]``."""
        self.check_input(x)
        if not x.numel():  # the operator would return a matrix, whatever the shape of x
            shape = (*x.shape[:-1], self.weight.shape[0])
            return torch.empty(shape, dtype=self.config.out_dtype)
        if x.dim() == 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        if self._planned.takes(x):
            return self._planned.linear(self, x)
        known = bool(self._prepared_name) and is_plain(x)
        prepared = self._prepared_for(x.shape) if known else None
        if prepared is not None:
            return self._by_prepared(x, prepared)
        weight, bias = self.packed_for(())
        out: torch.Tensor = torch.ops.onednn.qlinear_pointwise.default(
            x,
            self.config.x_scale,
            self._zero_points[1],  # 0 where the bias contains it
            weight,
            self.weight_scale,
            self.weight_zero_point,
            bias,
            *self._out,
        )
        return out
