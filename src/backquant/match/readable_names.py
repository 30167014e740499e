"""Short readable names of operators, patterns and dtypes, as they stand in verdicts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from backquant.backend_config import BackendPatternConfig, GraphPattern
from backquant.backend_config.naming import short_name
from backquant.backend_config.pattern import NormalPattern, calls_text


def op_name(op: Any) -> str:
    """``Conv2d``, ``torch.add``, ``F.relu``, ``.view()``; QAT classes with their package.

    >>> import torch
    >>> op_name(torch.nn.Conv2d), op_name(torch.add), op_name("view")
    ('Conv2d', 'torch.add', '.view()')
    """
    return _cached_name(op)


@lru_cache(maxsize=4096)
def _cached_name(op: Any) -> str:
    if not isinstance(op, type):
        return short_name(op)
    parts = op.__module__.split(".")
    return f"qat.{op.__name__}" if "qat" in parts and "nn" in parts else op.__name__


def pattern_text(pattern: NormalPattern) -> str:
    """A pattern in dataflow order: ``Conv2d, ReLU``; nested calls where it is no sequence.

    >>> import torch
    >>> from torch import nn
    >>> from backquant.backend_config.pattern import MatchAllNode, from_reversed, normal_form
    >>> pattern_text(normal_form((nn.Conv2d, nn.ReLU)))
    'Conv2d, ReLU'
    >>> pattern_text(from_reversed((torch.add, MatchAllNode, nn.Conv2d)))
    'torch.add(*, Conv2d)'
    """
    if pattern.is_sequential and pattern.nodes[0].kind != "any":
        return ", ".join(op_name(node.op) for node in pattern.nodes)
    return calls_text(pattern, op_name)


def entry_text(config: BackendPatternConfig) -> str:
    """What reports call an entry: the name of its graph pattern, or its pattern.

    >>> import torch
    >>> twice = GraphPattern(["x"], {"sum": (torch.add, "x", "x")}, name="twice")
    >>> entry_text(BackendPatternConfig(twice)), entry_text(BackendPatternConfig(torch.add))
    ('twice', 'torch.add')
    """
    named = isinstance(config.pattern, GraphPattern) and config.pattern.name
    return named or pattern_text(config.normal_pattern)
