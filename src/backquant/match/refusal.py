"""One rule of a description that a request breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    GraphPattern,
)
from backquant.backend_config.naming import short_name
from backquant.backend_config.pattern import NormalPattern, calls_text
from backquant.match.plan import Match, Plan, TensorRequest
from backquant.reason_codes import ReasonCode


@dataclass(frozen=True)
class Refusal:
    """One rule that is broken."""

    rule: ReasonCode
    asked: str
    admitted: str
    fix: str = ""


Rule: TypeAlias = Callable[[TensorRequest, DTypeWithConstraints], Refusal | None]


# The dtype config of the backend's description by which each quantized operator was admitted.
def chosen_dtype_config(plan: Plan, backend: BackendConfig, match: Match) -> DTypeConfig | None:
    """The dtype config that admitted a match; None if it stays float, or is a standalone or custom module."""
    decision = plan.decisions[match.anchor]
    if not decision.quantized or decision.dtype_config is None or match.entry < 0:
        return None
    return backend.shared_configs[match.entry].dtype_configs[decision.dtype_config]


def described_by_node(plan: Plan, backend: BackendConfig) -> dict[str, DTypeConfig]:
    """``chosen_dtype_config`` for every operator of the matches, by the name of its node."""
    found: dict[str, DTypeConfig] = {}
    for match in plan.matches:
        config = chosen_dtype_config(plan, backend, match)
        if config is not None:
            found.update(dict.fromkeys(match.nodes, config))
    return found


# Short readable names of operators, patterns and dtypes, as they stand in verdicts.


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
