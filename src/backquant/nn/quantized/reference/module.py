"""What all reference modules with one weight share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from backquant.errors import ConfigError
from backquant.nn.quantized.reference.integer_weights import IntegerWeights

_ModuleT = TypeVar("_ModuleT", bound=nn.Module)


def bare(cls: type[_ModuleT], settings: Mapping[str, Any]) -> _ModuleT:
    """A module of class ``cls`` with these attributes, and no tensors yet.

    Its constructor would make a weight, and fill it with random numbers, only to be replaced.

    >>> bare(nn.Linear, {"in_features": 3, "out_features": 2}).out_features
    2
    """
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    vars(made).update(settings)
    return made


def float_weight(module: nn.Module, name: str = "weight") -> torch.Tensor:
    """The float weight of ``module``; ``ConfigError`` if it has none.

    >>> float_weight(nn.Linear(3, 2)).shape
    torch.Size([2, 3])
    """
    weight = getattr(module, name, None)
    if isinstance(weight, torch.Tensor) and weight.is_floating_point():
        return weight.detach()
    raise ConfigError(
        f"{type(module).__name__} has no float {name} to quantize",
        where="from_float(module, weight_qparams)",
        fix="pass the float module that the reference module stands for",
    )


def float_bias(module: nn.Module, name: str = "bias") -> torch.Tensor | None:
    """The bias of ``module``, or ``None``.

    >>> float_bias(nn.Linear(3, 2, bias=False)) is None
    True
    """
    bias = getattr(module, name, None)
    return bias.detach() if isinstance(bias, torch.Tensor) else None


def take_bias(reference: nn.Module, bias: torch.Tensor | None, name: str = "bias") -> None:
    """Give ``reference`` its own copy of ``bias``, or none.

    >>> linear = nn.Linear(2, 2)
    >>> take_bias(linear, torch.ones(2)); linear.bias
    Parameter containing:
    tensor([1., 1.], requires_grad=True)
    """
    copy = None if bias is None else nn.Parameter(bias.detach().clone())
    reference.register_parameter(name, copy)


class ReferenceModule(IntegerWeights):
    """A float operator with an integer weight: the forward runs in float on the dequantized weight.

    ``IntegerWeights`` with the one name ``weight``: buffers ``weight``, ``weight_scale``,
    ``weight_zero_point`` and attributes ``weight_qscheme``, ``weight_dtype``, ``weight_axis``,
    ``weight_quant_min``, ``weight_quant_max``. ``bias`` is a float parameter or ``None``.
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
        self._store("weight", weight, qparams)

    def dequantized_weight(self) -> torch.Tensor:
        """The float weight that the integers stand for, of the shape of ``weight``."""
        return self._dequantized("weight")

    def get_weight(self) -> torch.Tensor:
        """PyTorch's name of ``dequantized_weight``."""
        return self.dequantized_weight()

    def get_quantized_weight(self) -> torch.Tensor:
        """PyTorch's name of ``weight``; here a plain integer tensor."""
        return self.weight
