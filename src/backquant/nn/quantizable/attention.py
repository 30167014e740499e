"""Multi-head attention rebuilt from parts that observers reach."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from backquant.errors import InputError
from backquant.nn.quantizable.lstm_cell import require_float
from backquant.nn.quantizable.observing import observe, require_qconfig
from backquant.nn.quantizable.slots import FloatFunctional, SlotLinear, SlotQuantStub
from backquant.nn.stubs import DeQuantStub

_PROJECTIONS = ("linear_Q", "linear_K", "linear_V")


class MultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with a linear per projection; the scores are computed in float.

    Arguments, inputs and outputs are those of ``nn.MultiheadAttention``. The joined ``in_proj_*``
    parameters do not exist here: PyTorch's quantizable form keeps them unused, which DDP refuses.

    >>> attention = MultiheadAttention(8, 2, batch_first=True)
    >>> output, weights = attention(*[torch.zeros(1, 5, 8)] * 3)
    >>> output.shape, weights.shape
    (torch.Size([1, 5, 8]), torch.Size([1, 5, 5]))
    """

    _FLOAT_MODULE = nn.MultiheadAttention

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            **factory,
        )
        for name in ("in_proj_weight", "in_proj_bias", *(f"{p}_proj_weight" for p in "qkv")):
            self._parameters[name] = None
        self.linear_Q = SlotLinear(embed_dim, embed_dim, bias, **factory)
        self.linear_K = SlotLinear(self.kdim, embed_dim, bias, **factory)
        self.linear_V = SlotLinear(self.vdim, embed_dim, bias, **factory)
        self.out_proj = SlotLinear(embed_dim, embed_dim, bias, **factory)  # type: ignore[assignment]
        scaling = FloatFunctional()
        scaling.qconfig = None  # type: ignore[assignment]  # a product with a number: not observed
        self.q_scaling_product = scaling
        self.quant_attn_output = SlotQuantStub()
        self.quant_attn_output_weights = SlotQuantStub()
        self.dequant_q, self.dequant_k = DeQuantStub(), DeQuantStub()
        self.dequant_v = DeQuantStub()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``nn.MultiheadAttention.forward``; ``is_causal`` is a hint and needs ``attn_mask``."""
        if is_causal and attn_mask is None:
            raise InputError(
                "is_causal needs attn_mask",
                where="backquant.nn.quantizable.MultiheadAttention.forward",
                fix="attn_mask=torch.nn.Transformer.generate_square_subsequent_mask(length)",
            )
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        elif self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        sizes = (query.shape[1], self.num_heads, query.shape[0], key.shape[0])
        mask = additive_mask(attn_mask, key_padding_mask, sizes, query.dtype)
        output, weights = self._attend(query, key, value, mask)
        if not batched:
            output, weights = output.squeeze(1), weights.squeeze(0)
        elif self.batch_first:
            output = output.transpose(0, 1)
        if not need_weights:
            return output, None
        return output, weights.mean(-3) if average_attn_weights else weights

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(L, N, E)`` and weights ``(N, heads, L, S)``."""
        length, batch = query.shape[:2]
        q = self.linear_Q(query)
        q = self.q_scaling_product.mul_scalar(q, float(self.head_dim) ** -0.5)
        k = self._extended(self.linear_K, self.linear_K(key), self.bias_k)
        v = self._extended(self.linear_V, self.linear_V(value), self.bias_v)
        extra = k.shape[0] - key.shape[0]
        if mask is not None and extra:
            mask = F.pad(mask, (0, extra))
        q = self.dequant_q(self._heads(q))
        k, v = self.dequant_k(self._heads(k)), self.dequant_v(self._heads(v))
        scores = torch.bmm(q, k.transpose(1, 2))
        weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
        weights = F.dropout(weights, self.dropout, self.training)
        output = torch.bmm(weights, v).transpose(0, 1).reshape(length, batch, self.embed_dim)
        output = self.out_proj(self.quant_attn_output(output))
        weights = self.quant_attn_output_weights(weights)
        return output, weights.view(batch, self.num_heads, length, -1)

    def _extended(
        self, linear: nn.Module, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Keys or values ``(S, N, E)`` with the learned and the zero position, where asked for."""
        parts = [x]
        if bias is not None:  # it shares the qparams of what it is concatenated with
            observed: torch.Tensor = linear._filled(bias)  # type: ignore[operator]
            parts.append(observed.expand(1, x.shape[1], -1))
        if self.add_zero_attn:
            parts.append(x.new_zeros(1, *x.shape[1:]))
        return torch.cat(parts) if len(parts) > 1 else x

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """``(S, N, E)`` to ``(N * heads, S, head_dim)``."""
        return x.reshape(x.shape[0], -1, self.head_dim).transpose(0, 1)

    def _get_name(self) -> str:
        return "QuantizableMultiheadAttention"

    @classmethod
    def from_float(cls, other: nn.Module) -> MultiheadAttention:
        """The observed form of an ``nn.MultiheadAttention`` with a ``qconfig``, in its mode.

        The parameters are shared, or views where ``other`` joins them. In training mode it is
        fake-quantized. Raises ``ConfigError`` for another type or without ``qconfig``.
        """
        float_mha = require_float(cls, other, cls._FLOAT_MODULE)
        qconfig = require_qconfig(other, "quantizable.MultiheadAttention")
        attention = cls(
            float_mha.embed_dim,
            float_mha.num_heads,
            float_mha.dropout,
            float_mha.in_proj_bias is not None,
            float_mha.bias_k is not None,
            float_mha.add_zero_attn,
            float_mha.kdim,
            float_mha.vdim,
            float_mha.batch_first,
            device="meta",
        )
        attention.bias_k, attention.bias_v = float_mha.bias_k, float_mha.bias_v
        attention.out_proj.weight = float_mha.out_proj.weight
        attention.out_proj.bias = float_mha.out_proj.bias
        _split_projections(attention, float_mha)
        attention.qconfig = qconfig
        attention.train(other.training)
        observe(attention, qconfig)
        return attention

    def dequantize(self) -> nn.MultiheadAttention:
        """A new ``nn.MultiheadAttention`` with the weights of this module, dequantized if need be.

        PyTorch's raises for biases that are not zero.
        """
        plain = nn.MultiheadAttention(
            self.embed_dim,
            self.num_heads,
            self.dropout,
            self.linear_Q.bias is not None,
            self.bias_k is not None,
            self.add_zero_attn,
            self.kdim,
            self.vdim,
            self.batch_first,
            device=self.linear_Q.weight.device,
        )
        linears = [self.get_submodule(name) for name in _PROJECTIONS]
        weights = [_float_weight(linear) for linear in linears]
        with torch.no_grad():
            if plain._qkv_same_embed_dim:
                plain.in_proj_weight.copy_(torch.cat(weights))
            else:
                for name, weight in zip("qkv", weights, strict=True):
                    plain.get_parameter(f"{name}_proj_weight").copy_(weight)
            if plain.in_proj_bias is not None:
                biases = tuple(linear.get_parameter("bias") for linear in linears)
                plain.in_proj_bias.copy_(torch.cat(biases))
            plain.out_proj.weight.copy_(_float_weight(self.out_proj))
            for name in ("bias_k", "bias_v"):
                if getattr(self, name) is not None:
                    plain.get_parameter(name).copy_(getattr(self, name))
            if self.out_proj.bias is not None:
                plain.out_proj.bias.copy_(self.out_proj.bias)
        return plain.train(self.training)


def _float_weight(linear: nn.Module) -> torch.Tensor:
    dequantized = getattr(linear, "dequantized_weight", None)
    weight: torch.Tensor = linear.weight if dequantized is None else dequantized()  # type: ignore[assignment]
    return weight


def _split_projections(attention: MultiheadAttention, mha: Any) -> None:
    def own(tensor: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(tensor.detach(), tensor.requires_grad)

    if mha._qkv_same_embed_dim:
        weights = mha.in_proj_weight.chunk(3)
    else:
        weights = (mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight)
    biases = [None] * 3 if mha.in_proj_bias is None else mha.in_proj_bias.chunk(3)
    for name, weight, bias in zip(_PROJECTIONS, weights, biases, strict=True):
        linear = attention.get_submodule(name)
        linear.register_parameter("weight", own(weight))
        linear.register_parameter("bias", None if bias is None else own(bias))


# Attention masks in one form: a float tensor that is added to the scores.


def _as_float(mask: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    if mask.is_floating_point():
        return mask.to(dtype)
    if mask.dtype not in (torch.bool, torch.uint8):
        raise InputError(
            f"{name} is boolean or floating point, got {mask.dtype}",
            where="backquant.nn.quantizable.MultiheadAttention.forward",
            fix=f"{name}={name}.bool()",
        )
    zeros = torch.zeros_like(mask, dtype=dtype)
    return zeros.masked_fill(mask.bool(), float("-inf"))


def _check(name: str, mask: torch.Tensor, *shapes: tuple[int, ...]) -> None:
    if tuple(mask.shape) not in shapes:
        raise InputError(
            f"{name} has shape {tuple(mask.shape)}",
            where="backquant.nn.quantizable.MultiheadAttention.forward",
            fix=f"pass {name} of shape " + " or ".join(str(shape) for shape in shapes),
        )


def additive_mask(
    attn_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Both masks as one, that broadcasts to ``(N * heads, L, S)``; ``None`` when there is none.

    ``sizes`` are N, heads, L and S. ``attn_mask`` is ``(L, S)`` or ``(N * heads, L, S)``,
    ``key_padding_mask`` is ``(N, S)``; boolean ones are true where attention is not allowed, float
    ones are added. Raises ``InputError`` for other shapes and dtypes.

    >>> additive_mask(torch.tensor([[False, True]]), None, (1, 1, 1, 2), torch.float32)
    tensor([[0., -inf]])
    """
    batch, heads, length, source = sizes
    merged = None
    if attn_mask is not None:
        _check("attn_mask", attn_mask, (length, source), (batch * heads, length, source))
        merged = _as_float(attn_mask, "attn_mask", dtype)
    if key_padding_mask is not None:
        _check("key_padding_mask", key_padding_mask, (batch, source))
        padding = _as_float(key_padding_mask, "key_padding_mask", dtype)
        padding = padding.repeat_interleave(heads, 0).unsqueeze(1)
        merged = padding if merged is None else merged + padding
    return merged
