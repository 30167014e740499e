"""Attention masks in one form: a float tensor that is added to the scores."""

from __future__ import annotations

import torch

from backquant.errors import InputError


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
