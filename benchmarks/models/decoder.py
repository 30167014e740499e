"""A decoder of four layers as ``transformers`` builds it from a config: rotary angles, shared keys, SiLU."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["VOCABULARY", "decoder"]

VOCABULARY = 8000


class Decoder(nn.Module):
    """Tokens ``[batch, length]`` to logits ``[batch, length, vocabulary]``, without a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens).logits


def decoder() -> nn.Module:
    """Random weights. Needs the package ``transformers``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1408,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return Decoder(LlamaForCausalLM(config))
