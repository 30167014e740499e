"""BERT-base without padding, as ``transformers.BertModel`` defines it from its default configuration."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["TOKENS", "VOCABULARY", "bert_base"]

VOCABULARY, TOKENS = 30522, 128


class Bert(nn.Module):
    """Tokens ``[batch, length]`` to the last layer's states ``[batch, length, 768]``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.model(input_ids=tokens).last_hidden_state
        return states


def bert_base() -> nn.Module:
    """Random weights. Needs the package ``transformers``."""
    from transformers import BertConfig, BertModel

    return Bert(BertModel(BertConfig(), add_pooling_layer=False))
