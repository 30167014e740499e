"""The layers of ``nn.Transformer`` in evaluation mode, without the checks that a trace cannot take.

PyTorch's own ``forward`` looks for fused kernels and for causal masks, which depends on the values of
tensors. What is left is the arithmetic: a mask that happens to be causal is a mask like any other.

Source: PyTorch documentation, ``torch.nn.Transformer``; Xiong et al. 2020, figure 1 (``norm_first``).
"""

from __future__ import annotations

from typing import Any

from torch import nn


def encoder_layer(
    module: Any,
    src: Any,
    src_mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool = False,
) -> Any:
    """``nn.TransformerEncoderLayer``.

    >>> import torch
    >>> layer, x = nn.TransformerEncoderLayer(8, 2, 16).eval(), torch.randn(5, 3, 8)
    >>> torch.allclose(encoder_layer(layer, x), layer(x), atol=1e-6)
    True
    """
    rest = (src_mask, src_key_padding_mask)
    if module.norm_first:
        x = src + module._sa_block(module.norm1(src), *rest, is_causal=is_causal)
        return x + module._ff_block(module.norm2(x))
    x = module.norm1(src + module._sa_block(src, *rest, is_causal=is_causal))
    return module.norm2(x + module._ff_block(x))


def decoder_layer(module: Any, *args: Any, **kwargs: Any) -> Any:
    """``nn.TransformerDecoderLayer``, whose own ``forward`` can be traced."""
    return nn.TransformerDecoderLayer.forward(module, *args, **kwargs)


def encoder(
    module: Any,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool | None = None,
) -> Any:
    """``nn.TransformerEncoder``."""
    return _stack(
        module,
        src,
        src_mask=mask,
        is_causal=is_causal is True,
        src_key_padding_mask=src_key_padding_mask,
    )


def decoder(
    module: Any,
    tgt: Any,
    memory: Any,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    tgt_is_causal: bool | None = None,
    memory_is_causal: bool = False,
) -> Any:
    """``nn.TransformerDecoder``."""
    return _stack(
        module,
        tgt,
        memory,
        tgt_mask=tgt_mask,
        memory_mask=memory_mask,
        tgt_key_padding_mask=tgt_key_padding_mask,
        memory_key_padding_mask=memory_key_padding_mask,
        tgt_is_causal=tgt_is_causal is True,
        memory_is_causal=memory_is_causal,
    )


def _stack(module: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """The layers of an encoder or a decoder, one after the other."""
    for layer in module.layers:
        value = layer(value, *args, **kwargs)
    return value if module.norm is None else module.norm(value)


def transformer(
    module: Any,
    src: Any,
    tgt: Any,
    src_mask: Any = None,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    src_key_padding_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    src_is_causal: bool | None = None,
    tgt_is_causal: bool | None = None,
    memory_is_causal: bool = False,
) -> Any:
    """``nn.Transformer``."""
    memory = module.encoder(
        src, mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=src_is_causal
    )
    return module.decoder(
        tgt,
        memory,
        tgt_mask=tgt_mask,
        memory_mask=memory_mask,
        tgt_key_padding_mask=tgt_key_padding_mask,
        memory_key_padding_mask=memory_key_padding_mask,
        tgt_is_causal=tgt_is_causal,
        memory_is_causal=memory_is_causal,
    )
