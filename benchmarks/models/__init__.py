"""The benchmark's models: own definitions, random weights, no downloads.

Batch norms get the statistics of data, so that values stay in range through deep networks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.models.bert import TOKENS, VOCABULARY, bert_base
from benchmarks.models.convnext import convnext_tiny
from benchmarks.models.densenet import densenet121
from benchmarks.models.efficientnet import efficientnet_b0
from benchmarks.models.mobilenet import mobilenet_v2, mobilenet_v3_large
from benchmarks.models.resnet import resnet18, resnet50
from benchmarks.models.shufflenet import shufflenet_v2_x1_0
from benchmarks.models.swin import swin_t
from benchmarks.models.vit import vit_b_16

__all__ = ["MODELS", "Entry", "build"]


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


MODELS: dict[str, Entry] = {
    "resnet18": Entry(resnet18),
    "resnet50": Entry(resnet50),
    "mobilenet_v2": Entry(mobilenet_v2),
    "mobilenet_v3_large": Entry(mobilenet_v3_large),
    "efficientnet_b0": Entry(efficientnet_b0),
    "densenet121": Entry(densenet121),
    "shufflenet_v2_x1_0": Entry(shufflenet_v2_x1_0),
    "convnext_tiny": Entry(convnext_tiny),
    "swin_t": Entry(swin_t, transformer=True),
    "vit_b_16": Entry(vit_b_16, transformer=True),
    "bert_base": Entry(bert_base, tokens, transformer=True),
}


def build(name: str, seed: int = 0) -> nn.Module:
    """The model in evaluation mode: random weights, batch norms with the statistics of 8 inputs."""
    torch.manual_seed(seed)
    entry = MODELS[name]
    model = entry.make()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    if norms:
        for norm in norms:
            norm.momentum = None  # the mean over all batches
        with torch.no_grad():
            model.train()(entry.sample(8))
    return model.eval()
