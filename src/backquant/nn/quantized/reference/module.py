"""What all reference modules with one weight share: the integer weight and its qparams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from backquant.errors import ConfigError
from backquant.nn.quantized.reference.scheme import decode_scheme, encode_scheme
from backquant.nn.quantized.reference.weights import (
    WeightQParams,
    dequantize_weight,
    quantize_weight,
)

__all__ = ["ReferenceModule", "float_bias", "float_weight", "take_bias"]

# PyTorch's default for a reference module that is built without qparams.
_DEFAULT_QPARAMS: Mapping[str, Any] = {
    "qscheme": torch.per_tensor_affine,
    "dtype": torch.quint8,
    "scale": 1.0,
    "zero_point": 0,
}


def float_weight(module: nn.Module) -> torch.Tensor:
    """The float weight of ``module``; ``ConfigError`` if it has none.

    >>> float_weight(nn.Linear(3, 2)).shape
    torch.Size([2, 3])
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.is_floating_point():
        return weight.detach()
    raise ConfigError(
        f"{type(module).__name__} has no float weight to quantize",
        where="from_float(module, weight_qparams)",
        fix="pass the float module that the reference module stands for",
    )


def float_bias(module: nn.Module) -> torch.Tensor | None:
    """The bias of ``module``, or ``None``.

    >>> float_bias(nn.Linear(3, 2, bias=False)) is None
    True
    """
    bias = getattr(module, "bias", None)
    return bias.detach() if isinstance(bias, torch.Tensor) else None


def take_bias(reference: nn.Module, bias: torch.Tensor | None) -> None:
    """Give ``reference`` its own copy of ``bias``, or none.

    >>> linear = nn.Linear(2, 2)
    >>> take_bias(linear, torch.ones(2)); linear.bias
    Parameter containing:
    tensor([1., 1.], requires_grad=True)
    """
    copy = None if bias is None else nn.Parameter(bias.detach().clone())
    reference.register_parameter("bias", copy)


class ReferenceModule(nn.Module):
    """A float operator with an integer weight: the forward runs in float on the dequantized weight.

    Invariants:

    1. buffer ``weight``: a plain tensor of the storage dtype (int8, uint8, int32; float16 or
       bfloat16 for a weight that is only stored narrower);
    2. buffers ``weight_scale`` (float32) and ``weight_zero_point`` (int64, or float32 for
       ``per_channel_affine_float_qparams``): no dimension, or one entry per slice along
       ``weight_axis``;
    3. attributes ``weight_qscheme``, ``weight_dtype`` (the token that was asked for),
       ``weight_axis``, ``weight_quant_min``, ``weight_quant_max``.

    The ``state_dict`` holds tensors only; invariant 3 travels in it as an int64 tensor, so that it
    loads into a module built with other qparams.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_zero_point: torch.Tensor
    weight_qscheme: torch.qscheme | None
    weight_dtype: torch.dtype
    weight_axis: int
    weight_quant_min: int
    weight_quant_max: int

    def _store_weight(self, weight: torch.Tensor, qparams: Mapping[str, Any] | None) -> None:
        """Quantize the float ``weight`` and take it as this module's."""
        device = weight.device
        q = WeightQParams.from_dict(_DEFAULT_QPARAMS if qparams is None else qparams, device)
        quantized = quantize_weight(weight, q)
        if "weight" in self._parameters:
            del self._parameters["weight"]
        self.register_buffer("weight", quantized)
        self.register_buffer("weight_scale", q.scale)
        self.register_buffer("weight_zero_point", q.zero_point)
        self.weight_qscheme = q.qscheme
        self.weight_dtype = q.dtype
        self.weight_axis = q.axis
        self.weight_quant_min = q.quant_min
        self.weight_quant_max = q.quant_max

    def dequantized_weight(self) -> torch.Tensor:
        """The float weight that the integers stand for, of the shape of ``weight``."""
        return dequantize_weight(
            self.weight, self.weight_scale, self.weight_zero_point, self.weight_axis
        )

    def get_weight(self) -> torch.Tensor:
        """PyTorch's name of ``dequantized_weight``."""
        return self.dequantized_weight()

    def get_quantized_weight(self) -> torch.Tensor:
        """PyTorch's name of ``weight``; here a plain integer tensor."""
        return self.weight

    def get_extra_state(self) -> torch.Tensor:
        """Invariant 3 as an int64 tensor."""
        return encode_scheme(
            self.weight_qscheme,
            self.weight_dtype,
            (self.weight_axis, self.weight_quant_min, self.weight_quant_max),
        )

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Take over invariant 3 from the tensor that ``get_extra_state`` gave."""
        self.weight_qscheme, self.weight_dtype, numbers = decode_scheme(state)
        self.weight_axis, self.weight_quant_min, self.weight_quant_max = numbers

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Let dtype and number of scales follow the ``state_dict``; the weight's shape may not."""
        for name in ("weight", "weight_scale", "weight_zero_point"):
            value, own = state_dict.get(prefix + name), getattr(self, name)
            if not isinstance(value, torch.Tensor):
                continue
            shape = own.shape if name == "weight" else value.shape
            if own.dtype != value.dtype or own.shape != shape:
                self.register_buffer(name, torch.empty(shape, dtype=value.dtype, device=own.device))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
