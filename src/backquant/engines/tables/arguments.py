"""Reading the arguments of a call, whichever way they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from backquant.dtypes import QParams
from backquant.lower.kernels.postop import NONE, RELU, PostOp
from backquant.lower.rule import Operand, Site, Step, operand
from backquant.match.plan import Reason
from backquant.operators import spellings
from backquant.reason_codes import ReasonCode


def bind(node: Node, names: Sequence[str], defaults: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of ``node`` by name; ``None`` if it has one that ``names`` does not list.

    >>> import torch
    >>> graph = torch.fx.Graph()
    >>> call = graph.call_function(torch.flatten, (graph.placeholder("x"), 1), {"end_dim": 2})
    >>> found = bind(call, ("input", "start_dim", "end_dim"), {"start_dim": 0, "end_dim": -1})
    >>> found["start_dim"], found["end_dim"]
    (1, 2)
    """
    if len(node.args) > len(names) or any(name not in names for name in node.kwargs):
        return None
    found = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    return found if all(name in found for name in names) else None


def is_computed(value: Any) -> bool:
    """Whether an argument is computed in the graph, as a whole or in parts.

    >>> import torch
    >>> graph = torch.fx.Graph()
    >>> is_computed((1, graph.placeholder("size"))), is_computed((1, 2))
    (True, False)
    """
    found: list[Node] = []
    map_arg(value, found.append)
    return bool(found)


def numbers(value: int | Sequence[int], count: int) -> list[int]:
    """One number per dimension.

    >>> numbers(3, 2), numbers((1, 2), 2), numbers([4], 2)
    ([3, 3], [1, 2], [4, 4])
    """
    if isinstance(value, int):
        return [value] * count
    found = [int(v) for v in value]
    return found * count if len(found) == 1 else found


def first_operand(site: Site) -> Operand | None:
    """The tensor that the site's first operator reads first; ``None`` if it is no node."""
    node = site.node.args[0] if site.node.args else site.node.kwargs.get("input")
    return operand(node) if isinstance(node, Node) else None


def refuse_float_input(site: Site) -> Reason:
    """The reason for an operator whose input is not quantized."""
    return site.refuse(
        ReasonCode.FLOAT_INPUT,
        "an input that is computed in float",
        "an input quantized per tensor with literal qparams",
    )


def integer_pair(site: Site) -> tuple[Operand, QParams] | Reason:
    """Input and output qparams of an operator that needs both, of one dtype."""
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    if site.out is None:
        return site.refuse(ReasonCode.FLOAT_OUTPUT, "a float result", "a quantized result")
    if x.qparams.dtype != site.out.dtype:
        asked = f"{x.qparams.dtype} to {site.out.dtype}"
        return site.refuse(ReasonCode.MIXED_DTYPES, asked, "one dtype for the input and the result")
    return x, site.out


class Joined(NamedTuple):
    """The parts of a concatenation, all of them integers, and the axis."""

    nodes: list[Node]
    qparams: list[QParams]
    dim: int


def joined(site: Site) -> Joined | Reason:
    """What ``torch.cat`` or ``torch.stack`` reads."""
    found = bind(site.node, ("tensors", "dim"), {"dim": 0})
    parts = found and found["tensors"]
    if not found or not isinstance(parts, (list, tuple)) or not isinstance(found["dim"], int):
        return site.refuse(ReasonCode.ARGUMENTS, "a computed list of tensors", "a literal list")
    operands = [operand(part) for part in parts if isinstance(part, Node)]
    qparams = [part.qparams for part in operands if part.qparams is not None]
    if not parts or len(qparams) != len(parts):
        return refuse_float_input(site)
    return Joined([part.node for part in operands], qparams, found["dim"])


FAR_APART = 2.0**22  # times 255 steps: the end of 32 bits


def refuse_far_apart(site: Site) -> Reason:
    """One step of an input is ``FAR_APART`` steps of the result or more: engines add up in 32 bits."""
    return site.refuse(
        ReasonCode.KERNEL_DEFECT,
        "a step of the input beyond 2**22 steps of the result",
        "scales of one magnitude: further out the kernel's integers overflow",
    )


# The spellings under which activation functions appear in a reference model.

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
