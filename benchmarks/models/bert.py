"""BERT-base (Devlin et al., 2019) without padding, its sizes as in ``transformers.BertConfig``."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.models.attention import SeparateAttention

__all__ = ["TOKENS", "VOCABULARY", "bert_base"]

VOCABULARY, TOKENS = 30522, 128


class Embeddings(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(512, width)
        self.kinds = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.register_buffer("order", torch.arange(512)[None])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = self.places(torch.narrow(self.order, 1, 0, tokens.size(1)))
        return self.norm(self.words(tokens) + places + self.kinds(torch.zeros_like(tokens)))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = SeparateAttention(width, heads)
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-12) for _ in range(2))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gelu = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.narrow(self.gelu(self.wide(x))))


class Bert(nn.Module):
    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.embeddings = Embeddings(width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embeddings(tokens))


def bert_base() -> nn.Module:
    return Bert(width=768, heads=12, depth=12)
