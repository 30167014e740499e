"""Modules that take and give PyTorch's quantized tensors: what a converted model shows to its reader.

They compute by PyTorch's operators on quantized tensors, so that a graph of them runs wherever it is taken:
interpreted, edited, copied into another module. Kept are plain integers with their scales beside them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from backquant.errors import UsageError
from backquant.nn.quantized.reference.module import bare

_ScaledT = TypeVar("_ScaledT", bound="Scaled")

# PyTorch says once per process that quantized tensors are deprecated: here, so that no user sees it.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8)


class Scaled(nn.Module):
    """A module whose result has ``scale`` and ``zero_point``.

    Both are plain numbers, and tensors in the ``state_dict``: ``conv.scale``, ``conv.zero_point``.
    ``limits`` and ``input_limits``: the smallest and the largest integer of the result and of each input,
    where they are narrower than the dtype (``None``: they are not). PyTorch's operators saturate at the limits
    of the dtype alone. ``changes`` counts what was set since.
    """

    scale: float
    zero_point: int
    limits: tuple[int, int] | None = None
    input_limits: tuple[tuple[int, int] | None, ...] = ()
    changes: int = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "training":
            self.__dict__["changes"] = self.changes + 1
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Quantized inputs, within the limits; a quantized result."""
        inputs = [x, *others]
        for i, limits in enumerate(self.input_limits):
            if limits is not None:
                inputs[i] = limited(inputs[i], *limits)
        out = self.compute(*inputs)
        return out if self.limits is None else limited(out, *self.limits)

    def compute(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """The result, saturated at the limits of its dtype."""
        raise NotImplementedError

    def _scaled(self, scale: Any, zero_point: Any) -> None:
        self.scale, self.zero_point = float(scale), int(zero_point)

    @classmethod
    def from_reference(
        cls: type[_ScaledT], module: nn.Module, scale: Any, zero_point: Any
    ) -> _ScaledT:
        """The quantized form of a float module, with which it shares parameters."""
        made = bare(cls, {})
        for name, value in vars(module).items():
            made.__dict__[name] = dict(value) if type(value) is dict else value
        made._scaled(scale, zero_point)
        return made

    def tensors(self) -> list[torch.Tensor]:
        """What is neither a parameter nor a buffer."""
        return []

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = torch.tensor(self.scale)
        destination[f"{prefix}zero_point"] = torch.tensor(self.zero_point)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *lists: Any
    ) -> None:
        missing: list[str] = lists[0]
        rest = dict(state_dict)
        for name, kind in (("scale", float), ("zero_point", int)):
            value = rest.pop(f"{prefix}{name}", None)
            if value is not None:
                setattr(self, name, kind(checked(value, f"{prefix}{name}")))
            elif strict:
                missing.append(f"{prefix}{name}")
        super()._load_from_state_dict(rest, prefix, local_metadata, False, *lists)
        own = {prefix + name for name in (*self._parameters, *self._buffers)}
        if strict:
            missing.extend(key for key in sorted(own - rest.keys()) if key not in missing)

    def _get_name(self) -> str:
        return f"Quantized{type(self).__name__}"

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), self._qparams_repr())))

    def _qparams_repr(self) -> str:
        return f"scale={self.scale}, zero_point={self.zero_point}"


def limited(x: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """A quantized tensor whose integers lie between ``low`` and ``high``.

    >>> limited(torch.quantize_per_tensor(torch.tensor([0.5, 9.0]), 0.5, 0, torch.quint8), 0, 9)
    tensor([0.5000, 4.5000], size=(2,), dtype=torch.quint8,
           quantization_scheme=torch.per_tensor_affine, scale=0.5, zero_point=0)
    """
    integers = x.int_repr().clamp(low, high)
    return torch._make_per_tensor_quantized_tensor(integers, x.q_scale(), x.q_zero_point())


def checked(value: Any, key: str) -> Any:
    """A scale or zero point from a ``state_dict``. Raises UsageError for one that is not finite.

    >>> checked(torch.tensor(0.5), "conv.scale")
    0.5
    """
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if not isinstance(number, (int, float)) or not math.isfinite(number):
        raise UsageError(
            f"{key} is {value}, which is no scale or zero point",
            where="load_state_dict",
            fix="save the state_dict of a model that was calibrated",
        )
    return number


class Weighted(Scaled):
    """A module with an integer weight.

    ``weight()`` is the quantized tensor, ``bias()`` the float bias or ``None``, as of PyTorch's modules;
    in the ``state_dict``: ``weight`` (integers), ``weight_scale``, ``weight_zero_point``, ``bias``.
    ``packing``: the setting of the engine to pack the weight for.
    """

    packing: Callable[[], AbstractContextManager[Any]] = nullcontext

    _integers: torch.Tensor
    _weight_scale: torch.Tensor
    _weight_zero_point: torch.Tensor
    _weight_axis: int
    _bias: torch.Tensor | None

    @classmethod
    def from_reference(
        cls: type[_ScaledT], module: nn.Module, scale: Any = 1.0, zero_point: Any = 0
    ) -> _ScaledT:
        """The quantized form of a reference module, with which it shares the integers."""
        source: Any = module[0] if isinstance(module, nn.Sequential) else module
        settings = {k: v for k, v in vars(source).items() if not k.startswith(("_", "weight_"))}
        made: Any = bare(cls, settings)
        made._take(source.weight, source.weight_scale, source.weight_zero_point)
        made._weight_axis = source.weight_axis
        made._bias = None if source.bias is None else source.bias.detach()
        made._of(module)
        made._scaled(scale, zero_point)
        result: _ScaledT = made
        return result

    def _of(self, module: nn.Module) -> None:
        """Take what else a fused module says."""

    def _take(self, weight: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> None:
        self._integers, self._weight_scale = weight.detach(), scale.detach()
        self._weight_zero_point = zero_point.detach()
        self.__dict__["_cached"] = None

    def weight(self) -> torch.Tensor:
        """The weight as a quantized tensor."""
        integers, scale, zero_point = self._integers, self._weight_scale, self._weight_zero_point
        if scale.dim() == 0 or scale.numel() == 1:
            make = torch._make_per_tensor_quantized_tensor
            return make(integers, float(scale.reshape(())), int(zero_point.reshape(())))
        per_channel = torch._make_per_channel_quantized_tensor
        return per_channel(integers, scale.double(), zero_point, self._weight_axis)

    def bias(self) -> torch.Tensor | None:
        """The float bias."""
        return self._bias

    def set_weight_bias(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take another quantized weight and bias, as PyTorch's modules do."""
        if weight.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric):
            scale, zero_point = weight.q_per_channel_scales(), weight.q_per_channel_zero_points()
            self._weight_axis = weight.q_per_channel_axis()
        else:
            scale = torch.tensor(weight.q_scale())
            zero_point = torch.tensor(weight.q_zero_point())
        self._take(weight.int_repr(), scale.float(), zero_point.long())
        self._bias = bias

    @property
    def _packed(self) -> Any:
        found = self.__dict__.get("_cached")
        if found is None:
            with self.packing():
                found = self.__dict__["_cached"] = self._prepack()
        return found

    def _prepack(self) -> Any:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached": None}

    def _tensors(self) -> Mapping[str, torch.Tensor | None]:
        return {
            "weight": self._integers,
            "weight_scale": self._weight_scale,
            "weight_zero_point": self._weight_zero_point,
            "bias": self._bias,
        }

    def tensors(self) -> list[torch.Tensor]:
        """Weight, its scales, and bias."""
        return [tensor for tensor in self._tensors().values() if tensor is not None]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, tensor in self._tensors().items():
            if tensor is not None:
                destination[prefix + name] = tensor if keep_vars else tensor.detach()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *lists: Any
    ) -> None:
        tensors = {name: state_dict.get(prefix + name) for name in self._tensors()}
        if tensors["weight"] is not None and tensors["weight"].is_quantized:
            self.set_weight_bias(tensors["weight"], tensors["bias"])
        else:
            needed = {name for name, tensor in self._tensors().items() if tensor is not None}
            lost = [prefix + name for name in needed if tensors[name] is None]
            if strict:
                lists[0].extend(lost)
            if not lost:
                self._take(*(tensors[n] for n in ("weight", "weight_scale", "weight_zero_point")))
                self._bias = tensors["bias"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)

    def _qparams_repr(self) -> str:
        by_channel = self._weight_scale.numel() > 1
        scheme = torch.per_channel_affine if by_channel else torch.per_tensor_affine
        return f"{super()._qparams_repr()}, qscheme={scheme}"
