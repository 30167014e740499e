"""The benchmark's models as torchvision and transformers define them: random weights, no downloads.

Batch norms get the statistics of data, so that values stay in range through deep networks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from benchmarks.models.bert import TOKENS, VOCABULARY, bert_base
from benchmarks.stock.images import torchvision_model
from benchmarks.stock.settle import settle

__all__ = ["MODELS", "SMALL", "Entry", "build", "entry_of"]


def image(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, 224, 224)


def tokens(batch: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, TOKENS))


@dataclass(frozen=True)
class Entry:
    """``make`` builds the model; ``sample`` draws a batch of inputs; ``transformer``: has attention."""

    make: Callable[[], nn.Module]
    sample: Callable[[int], torch.Tensor] = image
    transformer: bool = False


def _torchvision(builder: str, transformer: bool = False) -> Entry:
    return Entry(partial(torchvision_model, builder), transformer=transformer)


def _features(count: int, batch: int) -> torch.Tensor:
    return torch.randn(batch, count)


def _linear() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16))


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, activation="gelu")


def _sequence(batch: int) -> torch.Tensor:
    return torch.randn(batch, 32, 256)


MODELS: dict[str, Entry] = {
    "resnet18": _torchvision("resnet18"),
    "resnet50": _torchvision("resnet50"),
    "mobilenet_v2": _torchvision("mobilenet_v2"),
    "mobilenet_v3_large": _torchvision("mobilenet_v3_large"),
    "efficientnet_b0": _torchvision("efficientnet_b0"),
    "regnet_y_400mf": _torchvision("regnet_y_400mf"),
    "densenet121": _torchvision("densenet121"),
    "shufflenet_v2_x1_0": _torchvision("shufflenet_v2_x1_0"),
    "convnext_tiny": _torchvision("convnext_tiny"),
    "swin_t": _torchvision("swin_t", transformer=True),
    "vit_b_16": _torchvision("vit_b_16", transformer=True),
    "bert_base": Entry(bert_base, tokens, transformer=True),
}
# Models of which a good part of a call is what comes before and after the kernels.
SMALL: dict[str, Entry] = {
    "linear": Entry(_linear, partial(_features, 16)),
    "mlp": Entry(_mlp, partial(_features, 64)),
    "encoder": Entry(_encoder, _sequence, transformer=True),
}


def entry_of(name: str) -> Entry:
    """The model of ``MODELS`` or ``SMALL``."""
    return MODELS[name] if name in MODELS else SMALL[name]


def build(name: str, seed: int = 0) -> nn.Module:
    """The model in evaluation mode: random weights, batch norms with the statistics of 8 inputs."""
    torch.manual_seed(seed)
    entry = entry_of(name)
    return settle(entry.make(), entry.sample)
