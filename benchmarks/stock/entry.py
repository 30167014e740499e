"""One stock model: how it is made, and how inputs for it are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

__all__ = ["FAMILIES", "Entry"]

#: In the order of the tables.
FAMILIES = (
    "CNN",
    "mobile CNN",
    "attention in vision",
    "segmentation",
    "detection",
    "encoder",
    "decoder",
    "encoder-decoder",
    "speech",
    "audio",
    "recurrent",
    "recommender",
    "time series",
    "text and images",
)


@dataclass(frozen=True)
class Entry:
    """``make`` builds the model as its library defines it, ``sample(batch)`` draws inputs.

    A sample has one of the forms of example inputs: a tensor, a tuple of positional arguments, or a dict
    of keyword arguments. ``others``: arguments of ``sample`` for batches of other sizes that the float
    model takes, too. ``trained``: its package brings the weights.
    """

    name: str
    family: str
    make: Callable[[], nn.Module]
    sample: Callable[..., Any]
    others: tuple[tuple[Any, ...], ...] = ()
    trained: bool = False

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"{self.name}: no family {self.family!r}; one of {FAMILIES}")

    def called(self, name: str) -> Entry:
        """The same under another name."""
        return replace(self, name=name)

    def sampled_by(self, sample: Callable[..., Any]) -> Entry:
        """The same with other inputs."""
        return replace(self, sample=sample)
