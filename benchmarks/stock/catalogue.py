"""All stock models by name; each is made when it is asked for."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from benchmarks.stock import dense, images, language, senses, tables, trained
from benchmarks.stock.entry import FAMILIES, Entry
from benchmarks.stock.settle import settle

__all__ = ["build", "catalogue"]


@cache
def catalogue() -> dict[str, Entry]:
    """By name, in the order of the families.

    >>> catalogue()["torchvision.resnet18"].family
    'CNN'
    """
    found: dict[str, Entry] = {}
    for module in (images, dense, language, senses, tables, trained):
        for entry in module.entries():
            if entry.name in found:
                raise ValueError(f"two stock models are called {entry.name!r}")
            found[entry.name] = entry
    order = {family: place for place, family in enumerate(FAMILIES)}
    return {e.name: e for e in sorted(found.values(), key=lambda entry: order[entry.family])}


def build(entry: Entry, seed: int = 0) -> nn.Module:
    """The model in evaluation mode; random weights are drawn with ``seed`` and settled."""
    torch.manual_seed(seed)
    model = entry.make()
    return model.eval() if entry.trained else settle(model, entry.sample)
