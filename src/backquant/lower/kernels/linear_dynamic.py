"""Linear layers whose input is quantized at each call, or whose weight is float16."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from backquant.lower.kernels.repacked import RepackedKernel, pack_linear

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "swish": F.silu,
}


@dataclass(frozen=True)
class DynamicLinearConfig:
    """``engine``: a quantized engine of torch. ``weight_dtype``: int8 or float16. ``reduce_range``:
    quantize the input to 7 bits. The other fields are a ``PostOp``."""

    engine: str
    weight_dtype: torch.dtype
    reduce_range: bool = False
    post_op: str = "none"
    post_numbers: tuple[float, ...] = ()
    post_algorithm: str = ""


class DynamicLinear(RepackedKernel):
    """``quantized::linear_dynamic`` and ``quantized::linear_dynamic_fp16``, with a ReLU fused; other
    activations follow in float.

    Takes float ``[..., in]`` and returns float ``[..., out]``. Buffers: ``weight`` (int8 or float16
    ``[out, in]``), ``weight_scale``, ``weight_zero_point`` (one entry, or one per row), ``bias``.

    >>> config = DynamicLinearConfig("fbgemm", torch.int8)
    >>> one = torch.ones(1, 2, dtype=torch.int8)
    >>> tensors = {"weight": one, "weight_scale": torch.ones(1),
    ...            "weight_zero_point": torch.zeros(1, dtype=torch.int64)}
    >>> DynamicLinear(config, tensors)(torch.tensor([[0.0, 255.0]]))
    tensor([[255.]])
    """

    config_class = DynamicLinearConfig
    config: DynamicLinearConfig
    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_zero_point: torch.Tensor
    bias: torch.Tensor | None

    @property
    def name(self) -> str:
        c = self.config
        relu = "_relu" if c.post_op == "relu" else ""
        if c.weight_dtype == torch.float16:
            return f"quantized.linear{relu}_dynamic_fp16({c.engine})"
        bits = ", 7 bits" if c.reduce_range else ""
        return f"quantized.linear{relu}_dynamic({c.engine}{bits})"

    @classmethod
    def buffer_names(cls, config: DynamicLinearConfig) -> Iterable[str]:  # noqa: ARG003
        return ("weight", "weight_scale", "weight_zero_point", "bias")

    def _pack(self) -> Any:
        return pack_linear(
            self.config.engine, self.weight, self.weight_scale, self.weight_zero_point, self.bias
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Float ``[..., in]`` to ``[..., out]``, of the dtype of ``x``. Raises ``InputError``."""
        self.check_floats(x, self.weight.shape[1])
        c, ops = self.config, torch.ops.quantized
        rows = x.float().reshape(-1, x.shape[-1])
        out: torch.Tensor
        if c.weight_dtype == torch.float16:
            relu, plain = ops.linear_relu_dynamic_fp16, ops.linear_dynamic_fp16
            out = (relu if c.post_op == "relu" else plain)(rows, self.packed)
        else:
            relu, plain = ops.linear_relu_dynamic, ops.linear_dynamic
            out = (relu if c.post_op == "relu" else plain)(rows, self.packed, c.reduce_range)
        out = activated(c, out) if c.post_op not in ("none", "relu") else out
        return out.reshape(*x.shape[:-1], out.shape[-1]).to(x.dtype)


def activated(config: DynamicLinearConfig, x: torch.Tensor) -> torch.Tensor:
    """The activation behind the layer, of floats.

    >>> activated(DynamicLinearConfig("fbgemm", torch.int8, post_op="relu"), torch.tensor([-1.0]))
    tensor([0.])
    """
    name, numbers = config.post_op, config.post_numbers
    if name in ("none", "relu"):
        return x.relu() if name == "relu" else x
    if name == "hardtanh":
        return F.hardtanh(x, numbers[0], numbers[1])
    if name == "leaky_relu":
        return F.leaky_relu(x, numbers[0])
    if name == "gelu":
        return F.gelu(x, approximate=config.post_algorithm)
    return _ACTIVATIONS[name](x)
