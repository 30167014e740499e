"""Layers with integer weights between floats: linear layers that quantize their input at each call, and
tables of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from backquant.nn.quantized.scaled import Weighted

__all__ = ["Embedding", "EmbeddingBag", "Linear", "LinearReLU"]


class _Between(Weighted):
    """Floats or indices in, floats out. ``kernel`` makes what computes them of the tensors, by name."""

    kernel: Callable[[Mapping[str, Any]], Callable[..., Any]]

    def _prepack(self) -> Any:
        return self.kernel(self._buffers)

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

    def _get_name(self) -> str:
        return f"DynamicQuantized{type(self).__name__}"

    def extra_repr(self) -> str:
        weight = self._buffers["weight"]
        dtype = torch.float16 if weight is not None and weight.is_floating_point() else torch.qint8
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={dtype}"


class LinearReLU(Linear):
    """``Linear`` and ReLU in one."""


class Embedding(_Between):
    """Rows of an integer table."""

    num_embeddings: int
    embedding_dim: int

    def extra_repr(self) -> str:
        return f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}"


class EmbeddingBag(Embedding):
    """Sums or means of rows of an integer table."""
