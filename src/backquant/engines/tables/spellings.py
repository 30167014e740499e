"""The spellings under which activation functions appear in a reference model."""

from __future__ import annotations

from typing import Any

import torch

from backquant.engines.tables.arguments import bind
from backquant.lower.kernels.postop import NONE, RELU, PostOp
from backquant.lower.rule import Step
from backquant.operators import spellings

RELUS: tuple[Any, ...] = spellings("relu")
RELU6S: tuple[Any, ...] = spellings("relu6")
HARDTANHS: tuple[Any, ...] = spellings("hardtanh")
CLAMPS: tuple[Any, ...] = spellings("clamp")
_HARDSWISHES: tuple[Any, ...] = spellings("hardswish")
_SILUS: tuple[Any, ...] = spellings("silu")
_GELUS: tuple[Any, ...] = spellings("gelu")
_TANHS: tuple[Any, ...] = spellings("tanh")
_LEAKY: tuple[Any, ...] = spellings("leaky_relu")

POST_OPS: tuple[Any, ...] = (
    *RELUS,
    *RELU6S,
    *HARDTANHS,
    *CLAMPS,
    *_HARDSWISHES,
    *_SILUS,
    *_GELUS,
    *_TANHS,
    *_LEAKY,
)
_FIXED = {
    **dict.fromkeys(RELUS, RELU),
    **dict.fromkeys(RELU6S, PostOp("hardtanh", (0.0, 6.0))),
    **dict.fromkeys(_HARDSWISHES, PostOp("hardswish")),
    **dict.fromkeys(_SILUS, PostOp("swish")),
    **dict.fromkeys(_TANHS, PostOp("tanh")),
}


def post_op_of(step: Step | None) -> PostOp | None:
    """The post-op that ``step`` is; ``None`` for another operator, or if its numbers are not literals.

    >>> from torch.nn import functional as F
    >>> graph = torch.fx.Graph()
    >>> node = graph.call_function(F.hardtanh, (graph.placeholder("x"), -2.0), {"max_val": 2.0})
    >>> post_op_of(Step(F.hardtanh, node))
    PostOp(name='hardtanh', numbers=(-2.0, 2.0), algorithm='')
    """
    if step is None:
        return NONE
    if step.key in _FIXED:
        return _FIXED[step.key]
    if step.key in HARDTANHS:
        return _clamped(_values(step, ("min_val", "max_val"), (-1.0, 1.0)))
    if step.key in CLAMPS:
        return _clamped(_values(step, ("min", "max"), (None, None)))
    if step.key in _LEAKY:
        slope = _values(step, ("negative_slope",), (0.01,))
        return PostOp("leaky_relu", (float(slope[0]),)) if slope is not None else None
    if step.key in _GELUS:
        found = _values(step, ("approximate",), ("none",))
        return PostOp("gelu", (), found[0]) if found is not None else None
    return None


def _values(step: Step, names: tuple[str, ...], defaults: tuple[Any, ...]) -> list[Any] | None:
    """The literals ``names`` of a step, from its module or its call."""
    if step.module is not None:
        return [getattr(step.module, name) for name in names]
    found = bind(
        step.node,
        ("input", *names, "inplace"),
        {**dict(zip(names, defaults, strict=True)), "input": None, "inplace": False},
    )
    if found is None or any(isinstance(found[name], torch.fx.Node) for name in names):
        return None
    return [found[name] for name in names]


def _clamped(bounds: list[Any] | None) -> PostOp | None:
    if bounds is None:
        return None
    low, high = bounds
    if not all(bound is None or isinstance(bound, (int, float)) for bound in bounds):
        return None
    return PostOp(
        "hardtanh",
        (
            float("-inf") if low is None else float(low),
            float("inf") if high is None else float(high),
        ),
    )
