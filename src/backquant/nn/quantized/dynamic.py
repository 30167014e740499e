"""Layers with integer weights between floats: linear layers that quantize their input at each call, and
tables of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from backquant.errors import UsageError
from backquant.nn.quantized.scaled import Weighted
from backquant.observe import default_weight_observer

__all__ = ["Embedding", "EmbeddingBag", "Linear", "LinearReLU"]

_NUMBERS = ("weight_scale", "weight_zero_point")


class _Between(Weighted):
    """Floats or indices in, floats out. ``kernel`` makes what computes them of the tensors, by name; without
    one PyTorch's operator does."""

    kernel: Callable[[Mapping[str, Any]], Callable[..., Any]] | None = None

    def _prepack(self) -> Any:
        return self._operator() if self.kernel is None else self.kernel(self._buffers)

    def _operator(self) -> Callable[..., torch.Tensor]:
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the float module."""
        out: torch.Tensor = self._packed(*args, **kwargs)
        return out

    def weight(self) -> torch.Tensor:
        """The weight as a quantized tensor; a float16 weight, and one with float zero points, as it is."""
        held = self._buffers["weight"]
        zero_point = self._buffers["weight_zero_point"]
        assert held is not None and zero_point is not None
        is_plain = held.is_floating_point() or zero_point.is_floating_point()
        return held if is_plain else super().weight()


class Linear(_Between):
    """``torch.ops.quantized.linear_dynamic``, or with a float16 weight ``linear_dynamic_fp16``."""

    in_features: int
    out_features: int
    _operator_name = "linear_dynamic"

    @classmethod
    def _observer(cls, mod: Any) -> Any:
        requested = getattr(mod, "weight_fake_quant", None) or getattr(mod, "qconfig", None)
        return super()._observer(mod) if requested else default_weight_observer()

    def _operator(self) -> Callable[..., torch.Tensor]:
        weight, bias, ops = self.weight(), self.bias(), torch.ops.quantized
        rest: tuple[Any, ...] = (True,)  # 7 bits, as PyTorch's module
        run = getattr(ops, self._operator_name)
        if weight.is_quantized:
            packed = ops.linear_prepack(weight, bias)
        else:
            run, rest = getattr(ops, f"{self._operator_name}_fp16"), ()
            packed = ops.linear_prepack_fp16(weight.float(), bias)
        return lambda x: run(x, packed, *rest)

    def _get_name(self) -> str:
        return f"DynamicQuantized{type(self).__name__}"

    def extra_repr(self) -> str:
        weight = self._buffers["weight"]
        dtype = torch.float16 if weight is not None and weight.is_floating_point() else torch.qint8
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={dtype}"


class LinearReLU(Linear):
    """``Linear`` and ReLU in one."""

    _operator_name = "linear_relu_dynamic"


class Embedding(_Between):
    """Rows of an integer table."""

    num_embeddings: int
    embedding_dim: int
    dtype: torch.dtype

    @classmethod
    def from_float(cls: Any, mod: Any, use_precomputed_fake_quant: bool = False) -> Any:
        """Of a table with ``qconfig``, or one that was trained: runs PyTorch's operators."""
        made = super().from_float(mod, use_precomputed_fake_quant)
        made.dtype = cls._observer(mod).dtype
        return made

    def _of(self, module: Any) -> None:
        self.dtype = module.weight_dtype

    def _operator(self) -> Callable[..., torch.Tensor]:
        return partial(_operator("embedding", self.dtype), _packed_rows(self.dtype, self._buffers))

    def extra_repr(self) -> str:
        return f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}"


class EmbeddingBag(Embedding):
    """Sums or means of rows of an integer table."""

    mode: str
    include_last_offset: bool

    def _operator(self) -> Callable[..., torch.Tensor]:
        packed = _packed_rows(self.dtype, self._buffers)
        operator = _operator("embedding_bag", self.dtype)
        if self.mode != "sum":
            raise UsageError(
                f"PyTorch has no quantized table of embeddings for mode={self.mode!r}",
                where="nn.quantized.EmbeddingBag, in eager mode",
                fix="mode='sum'; or backquant.quantize(model, example_inputs), which has one",
            )

        def bag(
            indices: torch.Tensor,
            offsets: torch.Tensor | None = None,
            per_sample_weights: torch.Tensor | None = None,
        ) -> torch.Tensor:
            out: torch.Tensor = operator(
                packed, indices, offsets, False, 0, False, per_sample_weights, None,
                self.include_last_offset,
            )  # fmt: skip
            return out

        return bag


def _operator(name: str, dtype: torch.dtype) -> Any:
    bits = "4bit" if dtype == torch.quint4x2 else "byte"
    return getattr(torch.ops.quantized, f"{name}_{bits}")


def _packed_rows(dtype: torch.dtype, tensors: Mapping[str, Any]) -> Any:
    integers, scale, zero_point = (tensors[name] for name in ("weight", *_NUMBERS))
    rows = (integers - zero_point.float()[:, None]) * scale[:, None]
    table = torch.quantize_per_channel(rows, scale.float(), zero_point.float(), 0, dtype)
    return torch.ops.quantized.embedding_bag_prepack(table)
