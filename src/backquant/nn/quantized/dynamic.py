"""Layers with integer weights between floats: linear and recurrent layers that quantize their input at each
call, and tables of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from backquant.errors import UsageError
from backquant.nn.quantized.reference.module import bare
from backquant.nn.quantized.scaled import Weighted, held
from backquant.observe import default_weight_observer

__all__ = [
    "GRU",
    "LSTM",
    "Embedding",
    "EmbeddingBag",
    "GRUCell",
    "LSTMCell",
    "Linear",
    "LinearReLU",
    "RNNCell",
]

_NUMBERS = ("weight_scale", "weight_zero_point")


class _Between(Weighted):
    """Floats or indices in, floats out."""

    def _prepack(self) -> Any:
        return self._operator()

    def _operator(self) -> Callable[..., torch.Tensor]:
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the float module."""
        out: torch.Tensor = self._packed(*args, **kwargs)
        return out


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
        features = f"in_features={self.in_features}, out_features={self.out_features}"
        if held(self, "weight").is_floating_point():
            return f"{features}, dtype=torch.float16"
        return f"{features}, dtype=torch.qint8, qscheme={self._qscheme()}"


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

    def _scaled(self, scale: Any, zero_point: Any) -> None:
        """It has none, as in PyTorch."""

    def _operator(self) -> Callable[..., torch.Tensor]:
        return partial(_operator("embedding", self.dtype), self._prepacked())

    def _prepacked(self) -> Any:
        return torch.ops.quantized.embedding_bag_prepack(self.weight())

    def _weight(self, name: str) -> torch.Tensor:
        integers, scale, zero_point = (held(self, n) for n in (name, *_NUMBERS))
        if not zero_point.is_floating_point():
            return super()._weight(name)
        scale, zero_point = (n.float().expand(len(integers)) for n in (scale, zero_point))
        rows = (integers - zero_point[:, None]) * scale[:, None]
        return torch.quantize_per_channel(rows, scale, zero_point, 0, self.dtype)

    def extra_repr(self) -> str:
        sizes = f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}"
        return f"{sizes}, dtype={self.dtype}, qscheme={self._qscheme()}"


class EmbeddingBag(Embedding):
    """Sums or means of rows of an integer table."""

    mode: str
    include_last_offset: bool

    def _operator(self) -> Callable[..., torch.Tensor]:
        packed = self._prepacked()
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


class _Recurrent(_Between):
    """Weights and biases have the names of the float module, each weight's scale and zero point beside it."""

    weight_names: tuple[str, ...]

    @classmethod
    def from_reference(cls: Any, module: Any, scale: Any = 1.0, zero_point: Any = 0) -> Any:  # noqa: ARG003
        """The quantized form of a reference module, with which it shares the integers."""
        settings = {k: v for k, v in vars(module).items() if not k.startswith(("_", "weight_"))}
        made = bare(cls, {**settings, "weight_names": module.weight_names})
        found = {**module._parameters, **module._buffers}
        for name in tensors_of(module.weight_names):
            value = found.get(name)
            made._buffers[name] = None if value is None else value.detach()
        made._weight_axis = vars(module)[f"{module.weight_names[0]}_axis"]
        return made

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Any:  # noqa: ARG003
        """Raises ``UsageError``: there is no such conversion by itself."""
        raise UsageError(
            f"a quantized {cls.__name__} is made by conversion",
            where=f"nn.quantized.dynamic.{cls.__name__}.from_float",
            fix="backquant.quantize_dynamic(model, {torch.nn." + cls.__name__ + "})",
        )

    @property
    def weight(self) -> NoReturn:  # there are several
        raise AttributeError("a recurrent layer has several weights: get_weight()")

    @property
    def weight_dtype(self) -> torch.dtype:
        """``torch.qint8``, or ``torch.float16``."""
        half = self.get_buffer(self.weight_names[0]).is_floating_point()
        return torch.float16 if half else torch.qint8

    dtype = weight_dtype

    def get_weight(self) -> dict[str, torch.Tensor]:
        """The weights as quantized tensors, by name; float16 weights as they are."""
        return {name: self._weight(name) for name in self.weight_names}

    def get_bias(self) -> dict[str, torch.Tensor | None]:
        """The float biases, by name."""
        return {name: self._buffers[name] for name in map(_bias, self.weight_names)}

    def set_weight_bias(self, weight_bias_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Take other quantized weights and biases, by name, as PyTorch's modules do."""
        for name in self.weight_names:
            self._take_weight(name, weight_bias_dict[name])
            self._buffers[_bias(name)] = weight_bias_dict[_bias(name)]

    def _get_name(self) -> str:
        return f"DynamicQuantized{type(self).__name__}"


def _bias(weight: str) -> str:
    return weight.replace("weight", "bias", 1)


def tensors_of(weights: tuple[str, ...]) -> list[str]:
    """The names of what belongs to these weights.

    >>> tensors_of(("weight_ih",))
    ['weight_ih', 'weight_ih_scale', 'weight_ih_zero_point', 'bias_ih']
    """
    return [n for w in weights for n in (w, f"{w}_scale", f"{w}_zero_point", _bias(w))]


class _Layer(_Recurrent):
    def extra_repr(self) -> str:
        return nn.RNNBase.extra_repr(self)  # type: ignore[arg-type]


class LSTM(_Layer):
    """``nn.LSTM`` that rounds its input and hidden state at each step."""


class GRU(_Layer):
    """``nn.GRU`` that rounds its input and hidden state at each step."""


class _Cell(_Recurrent):
    def extra_repr(self) -> str:
        return nn.RNNCellBase.extra_repr(self)  # type: ignore[arg-type]


class LSTMCell(_Cell):
    """``nn.LSTMCell`` that rounds its input and hidden state."""


class GRUCell(_Cell):
    """``nn.GRUCell`` that rounds its input and hidden state."""


class RNNCell(_Cell):
    """``nn.RNNCell`` that rounds its input and hidden state."""
