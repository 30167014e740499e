"""``nn.MultiheadAttention`` in evaluation mode, as linear layers and ``scaled_dot_product_attention``.

Nothing here looks into a tensor, so that it can be traced: what the arithmetic depends on (the number of
dimensions, masks of bools or of floats) is passed in as ``facts``.

1. Queries, keys and values that are one tensor have one linear layer, as in PyTorch; keys and values that
   are one tensor have one for both, with the rows of the weight that are theirs.
2. Without a batch dimension the batch is one.
3. Attention weights are computed beside the output; where nobody reads them, they are dropped from a
   graph. A row whose keys are all masked gives zeros then, and no NaN.

Source: PyTorch documentation, ``torch.nn.MultiheadAttention``, and Vaswani et al. 2017, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class TensorFacts:
    """What the arithmetic depends on of one argument."""

    rank: int
    dtype: torch.dtype

    @property
    def is_bool(self) -> bool:
        """Whether it is a mask of bools, true where a key is hidden."""
        return self.dtype == torch.bool


Facts = Mapping[str, TensorFacts]


# size: the arguments of nn.MultiheadAttention
def multihead_attention(
    module: nn.MultiheadAttention,
    facts: Facts,
    query: Any,
    key: Any,
    value: Any,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """What ``module(query, key, value, ...)`` returns in evaluation mode.

    ``facts``: of ``query`` and the masks, by the names of the arguments.

    >>> attention, x = nn.MultiheadAttention(8, 2).eval(), torch.randn(5, 3, 8)
    >>> output, weights = multihead_attention(
    ...     attention, {"query": TensorFacts(3, torch.float32)}, x, x, x
    ... )
    >>> torch.allclose(output, attention(x, x, x)[0], atol=1e-6), weights.shape
    (True, torch.Size([3, 5, 5]))
    """
    batched = facts["query"].rank == 3
    if not batched:
        query, key, value = _each(lambda x: x.unsqueeze(0), query, key, value)
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
    batch_first = module.batch_first or not batched
    q, k, v = _projected(module, query, key, value)
    if module.bias_k is not None:
        k, v = (_longer(x, b, batch_first) for x, b in ((k, module.bias_k), (v, module.bias_v)))
    q, k, v = (_heads(x, module, batch_first) for x in (q, k, v))
    if module.add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    only_causal = is_causal and key_padding_mask is None and not need_weights
    mask = _Mask(None, False)
    if not only_causal:
        more = (module.bias_k is not None) + module.add_zero_attn
        mask = _merged(module, facts, attn_mask, key_padding_mask, more)
    output = F.scaled_dot_product_attention(q, k, v, mask.allowed(), 0.0, only_causal)
    output = output.transpose(1, 2) if batch_first else output.permute(2, 0, 1, 3)
    output = F.linear(output.flatten(2), module.out_proj.weight, module.out_proj.bias)
    weights = None
    if need_weights:
        weights = _weights(q, k, module, mask)
        weights = weights.mean(dim=1) if average_attn_weights else weights
    if not batched:
        output = output.squeeze(0)
        weights = None if weights is None else weights.squeeze(0)
    return output, weights


def _each(change: Any, *values: Any) -> tuple[Any, ...]:
    """``change`` of each value; what is one object stays one object."""
    made: dict[int, Any] = {}
    for value in values:
        if id(value) not in made:
            made[id(value)] = change(value)
    return tuple(made[id(value)] for value in values)


# -- projections ---------------------------------------------------------------------------------------


def _projected(module: nn.MultiheadAttention, query: Any, key: Any, value: Any) -> tuple[Any, ...]:
    size, bias = module.embed_dim, module.in_proj_bias
    if not module._qkv_same_embed_dim:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        biases = [_rows(bias, size * i, size * (i + 1)) for i in range(3)]
        values = (query, key, value)
        return tuple(F.linear(x, w, b) for x, w, b in zip(values, weights, biases, strict=True))
    weight = module.in_proj_weight
    if query is key and key is value:
        return _parts(F.linear(query, weight, bias), 3)
    if key is value:
        q = F.linear(query, weight[:size], _rows(bias, 0, size))
        both = F.linear(key, weight[size:], _rows(bias, size, 3 * size))
        return (q, *_parts(both, 2))
    return tuple(
        F.linear(x, weight[size * i : size * (i + 1)], _rows(bias, size * i, size * (i + 1)))
        for i, x in enumerate((query, key, value))
    )


def _rows(bias: Any, start: int, end: int) -> Any:
    return None if bias is None else bias[start:end]


def _parts(value: Any, count: int) -> tuple[Any, ...]:
    parts = value.chunk(count, dim=-1)
    return tuple(parts[i] for i in range(count))


def _longer(value: Any, bias: Any, batch_first: bool) -> Any:
    """Keys or values with the learned one behind them; ``bias`` is ``[1, 1, features]``."""
    if batch_first:
        return torch.cat([value, bias.expand(value.size(0), -1, -1)], dim=1)
    return torch.cat([value, bias.expand(-1, value.size(1), -1)], dim=0)


def _heads(value: Any, module: nn.MultiheadAttention, batch_first: bool) -> Any:
    """``[batch, heads, length, features of a head]``."""
    shape = (value.size(0), value.size(1), module.num_heads, module.head_dim)
    heads = value.view(*shape)
    return heads.transpose(1, 2) if batch_first else heads.permute(1, 2, 0, 3)


# -- masks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mask:
    """Either bools, true where a key is hidden, or floats that are added to the scores."""

    value: Any
    is_bool: bool

    def allowed(self) -> Any:
        """As ``scaled_dot_product_attention`` takes it: bools are true where a key is seen."""
        return self.value.logical_not() if self.is_bool else self.value

    def on(self, scores: Any) -> Any:
        """The scores with the mask."""
        if self.value is None:
            return scores
        if self.is_bool:
            return scores.masked_fill(self.value, float("-inf"))
        return scores + self.value


def _merged(
    module: nn.MultiheadAttention, facts: Facts, attn_mask: Any, padding: Any, more: int
) -> _Mask:
    """Both masks for ``[batch, heads, queries, keys + more]``."""
    masks = []
    if attn_mask is not None:
        known = facts["attn_mask"]
        value = F.pad(attn_mask, (0, more)) if more else attn_mask
        if known.rank == 3:
            value = value.unflatten(0, (-1, module.num_heads))
        masks.append(_Mask(value, known.is_bool))
    if padding is not None:
        value = F.pad(padding, (0, more)) if more else padding
        value = value.unsqueeze(1).unsqueeze(2)
        masks.append(_Mask(value, facts["key_padding_mask"].is_bool))
    if len(masks) < 2:
        return masks[0] if masks else _Mask(None, False)
    if all(mask.is_bool for mask in masks):
        return _Mask(masks[0].value.logical_or(masks[1].value), True)
    one, other = (_added(mask, facts["query"].dtype) for mask in masks)
    return _Mask(one + other, False)


def _added(mask: _Mask, dtype: torch.dtype) -> Any:
    if not mask.is_bool:
        return mask.value
    return torch.zeros_like(mask.value, dtype=dtype).masked_fill(mask.value, float("-inf"))


def _weights(q: Any, k: Any, module: nn.MultiheadAttention, mask: _Mask) -> Any:
    scores = torch.matmul(q, k.transpose(-2, -1)) * module.head_dim**-0.5
    return F.softmax(mask.on(scores), dim=-1)
