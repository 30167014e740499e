"""Weights that stay in their files: a model larger than memory, read a piece at a time."""

from backquant.mapped.empty import EmptyOnMeta as EmptyOnMeta
from backquant.mapped.filled import filled as filled
from backquant.mapped.memory import MappedMemory as MappedMemory
from backquant.mapped.weights import WeightFiles as WeightFiles

__all__ = ["EmptyOnMeta", "MappedMemory", "WeightFiles", "filled"]
