"""Integer weights under names: storage, dequantization, and their place in a ``state_dict``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from backquant.dtypes import block_of, decode_schemes, dequantize_tensor, encode_schemes
from backquant.errors import ConfigError
from backquant.nn.quantized.reference.weights import quantize_weight, weight_qparams

# PyTorch's default for a reference module that is built without qparams.
_DEFAULT_QPARAMS: Mapping[str, Any] = {
    "qscheme": torch.per_tensor_affine,
    "dtype": torch.quint8,
    "scale": 1.0,
    "zero_point": 0,
}
_ATTRIBUTES = ("qscheme", "dtype", "axis", "quant_min", "quant_max")


class IntegerWeights(nn.Module):
    """A module some of whose weights are integers; the others stay float parameters.

    Invariants, for every ``name`` in ``weight_names``:

    1. buffer ``{name}``: a plain tensor of the storage dtype (int8, uint8, int32; float16 or
       bfloat16 for a weight that is only stored narrower);
    2. buffers ``{name}_scale`` (float32) and ``{name}_zero_point`` (int64, or float32 for
       ``per_channel_affine_float_qparams``): no dimension, or one entry per slice along the axis; of
       groups and blocks the grid of their scales, and zero points in the storage dtype;
    3. attributes ``{name}_qscheme``, ``{name}_dtype`` (the token that was asked for),
       ``{name}_axis``, ``{name}_quant_min``, ``{name}_quant_max``.

    The ``state_dict`` holds tensors only; those of invariant 3 travel in it as numbers, so that it loads into
    a module built with other qparams.
    """

    weight_names: tuple[str, ...] = ("weight",)

    def _get_name(self) -> str:
        return f"Quantized{type(self).__name__}(Reference)"

    def _store(self, name: str, weight: torch.Tensor, qparams: Mapping[str, Any] | None) -> None:
        """Quantize the float ``weight`` and take it as ``name``."""
        chosen = _DEFAULT_QPARAMS if qparams is None else qparams
        try:
            q = weight_qparams(chosen, weight.device)
            quantized = quantize_weight(weight, q)
        except ConfigError as error:
            where = f"{name} of {type(self).__name__}: {error.where}"
            raise ConfigError(error.what, where=where, fix=error.fix) from error
        self._parameters.pop(name, None)
        self.register_buffer(name, quantized)
        self.register_buffer(f"{name}_scale", q.scale)
        self.register_buffer(f"{name}_zero_point", q.zero_point)
        for attribute in _ATTRIBUTES:
            setattr(self, f"{name}_{attribute}", getattr(q, attribute))
        setattr(self, f"{name}_axis", q.axis or 0)

    def _dequantized(self, name: str) -> torch.Tensor:
        """The float weight that the integers of ``name`` stand for."""
        scale, zero_point = self._buffers[f"{name}_scale"], self._buffers[f"{name}_zero_point"]
        quantized = self._buffers[name]
        assert quantized is not None and scale is not None and zero_point is not None
        axis: int = vars(self)[f"{name}_axis"]
        by_channel = scale.dim() == 1 and not zero_point.is_floating_point()
        by_channel = by_channel and quantized.dtype != torch.uint16  # the operator subtracts in it
        if (
            by_channel
            and not quantized.is_floating_point()
            and torch.compiler.is_dynamo_compiling()
        ):
            # the one form of a weight that Inductor's integer kernels are found by
            bounds = vars(self)[f"{name}_quant_min"], vars(self)[f"{name}_quant_max"]
            by_channel_op = torch.ops.quantized_decomposed.dequantize_per_channel.default
            found: torch.Tensor = by_channel_op(
                quantized, scale, zero_point, axis, *bounds, quantized.dtype
            )
            return found
        block = block_of(quantized.shape, scale.shape)
        return dequantize_tensor(quantized, scale, zero_point, axis, block)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Invariant 3 under PyTorch's keys, each number in a tensor."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.weight_names:
            keys = self._scheme_keys(prefix, name)
            scheme = tuple(vars(self)[key.removeprefix(prefix)] for key in keys)
            destination.update(zip(keys, encode_schemes([scheme])[0], strict=True))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Let dtype and number of scales follow the ``state_dict``; the weight's shape may not."""
        for name in self.weight_names:
            for buffer in (name, f"{name}_scale", f"{name}_zero_point"):
                self._fit_buffer(buffer, state_dict.get(prefix + buffer), resize=buffer != name)
        lists = missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        for name in self.weight_names:
            keys = self._scheme_keys(prefix, name)
            unexpected_keys[:] = [key for key in unexpected_keys if key not in keys]
            missing = [key for key in keys if key not in state_dict]
            missing_keys += missing if strict else []
            if not missing:
                (scheme,) = decode_schemes(_row([state_dict[key] for key in keys]))
                for key, value in zip(keys, scheme, strict=True):
                    setattr(self, key.removeprefix(prefix), value)

    @staticmethod
    def _scheme_keys(prefix: str, name: str) -> list[str]:
        return [f"{prefix}{name}_{attribute}" for attribute in _ATTRIBUTES]

    def _fit_buffer(self, name: str, value: object, *, resize: bool) -> None:
        own = self._buffers[name]
        if not isinstance(value, torch.Tensor):
            return
        if own is None:  # it was taken away
            self.register_buffer(name, torch.empty_like(value))
            return
        shape = value.shape if resize else own.shape
        if own.dtype != value.dtype or own.shape != shape:
            fitting = torch.empty(shape, dtype=value.dtype, device=own.device)
            self.register_buffer(name, fitting)


def _row(numbers: list[Any]) -> Any:
    """One row of ``encode_schemes``; what is none as it is, for ``decode_schemes`` to refuse."""
    is_row = all(isinstance(n, torch.Tensor) and n.dim() == 0 and not n.is_meta for n in numbers)
    return torch.stack([n.cpu() for n in numbers])[None] if is_row else numbers
