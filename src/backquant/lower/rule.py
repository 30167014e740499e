"""What a lowering table is made of.

A ``LowerRule`` names a chain of float operators and a function that builds the kernel for one
occurrence (a ``Site``). The build function decides and edits nothing: it returns an ``Emit``, which
the pass inserts, or a ``Reason``, after which the next rule is tried, or ``None`` where the site is
another rule's business.

Invariants

1. The operators of a site form a chain: each but the last is used by the next one only. Operators
   inside one fused module count like operators of their own.
2. ``Site.out`` is set only when the site's value is used by exactly one quantize node.
3. An ``Emit`` with ``out`` yields integers with these qparams; the pass dequantizes them where
   float is still read. Without ``out`` it yields what the site's last operator yielded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from backquant.backend_config import DTypeConfig
from backquant.dtypes import QParams
from backquant.graph import get_module
from backquant.lower.machine import EngineInfo
from backquant.lower.qdq import (
    described_arithmetic,
    integer_source,
    is_dequantize,
    is_described_quantize,
    is_quantize,
    qparams_of,
)
from backquant.match.plan import Reason
from backquant.nn.intrinsic import ConvAdd2d, ConvAddReLU2d

OpKey = Any  # a module class, a callable, or a method's name


@dataclass(frozen=True)
class KernelUse:
    """One kernel of a lowered model: the nodes it replaced, in dataflow order, and what runs now."""

    nodes: tuple[str, ...]
    kernel: str
    dtype: torch.dtype
    engine: str

    def __str__(self) -> str:
        return f"{'+'.join(self.nodes)}: {self.kernel} ({str(self.dtype).removeprefix('torch.')})"


@dataclass(frozen=True)
class Lowered:
    """A lowered model, with one record per kernel and the reason for each operator left in float."""

    graph_module: GraphModule
    kernels: tuple[KernelUse, ...]
    left_in_float: tuple[Reason, ...]


@dataclass(frozen=True)
class Operand:
    """A tensor argument: integers with their qparams, or (``qparams`` is None) a float value."""

    node: Node
    qparams: QParams | None

    @property
    def is_integer(self) -> bool:
        return self.qparams is not None


def operand(node: Node) -> Operand:
    """``node`` as an operand: if it is a dequantize node, the integers that it dequantizes."""
    if is_dequantize(node):
        return Operand(integer_source(node), qparams_of(node))
    return Operand(node, None)


@dataclass(frozen=True)
class Step:
    """One operator of a chain. ``module`` is set when it is a module, inside a fused one or not."""

    key: OpKey
    node: Node
    module: nn.Module | None = None


@dataclass(frozen=True)
class Site:
    """One occurrence of a rule's chain in the reference model.

    ``described``: the dtype config of the description that the operator is quantized by.
    """

    graph_module: GraphModule
    steps: tuple[Step, ...]
    quantize: Node | None
    out: QParams | None
    engine: EngineInfo
    described: DTypeConfig | None = None

    @property
    def node(self) -> Node:
        """The first operator's node: it holds the arguments."""
        return self.steps[0].node

    @property
    def last(self) -> Node:
        return self.steps[-1].node

    @property
    def module(self) -> nn.Module:
        """The first operator's module; only for rules whose first operator is a module."""
        module = self.steps[0].module
        assert module is not None
        return module

    @property
    def arithmetic(self) -> tuple[str, str]:
        """The requantization and rounding of the result, by the names of the description."""
        return (
            ("float", "half_even") if self.quantize is None else described_arithmetic(self.quantize)
        )

    @property
    def table_entries(self) -> int | None:
        """The size of the lookup table that the description demands; None: one entry for each integer."""
        return None if self.described is None else self.described.table_entries

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The distinct nodes of the chain."""
        return tuple(dict.fromkeys(step.node for step in self.steps))

    def refuse(self, rule: str, asked: str, admitted: str, fix: str = "") -> Reason:
        """The reason why this site is not lowered by a rule."""
        return Reason(
            self.node.name, rule, asked, admitted, fix, place=f"engine {self.engine.name}"
        )


# Target of an ``Emit`` that inserts no node: its value is its first argument.
IDENTITY = "identity"


@dataclass(frozen=True)
class Emit:
    """What to insert for a site: a kernel function or a kernel module, and its arguments.

    ``in_range``: the kernel keeps ``quant_min`` and ``quant_max`` of ``out`` by itself; otherwise the
    pass saturates after it when they are narrower than the dtype.
    ``each_item``: the kernel gives a tuple of integer tensors, each with the qparams ``out``, or,
    without ``out``, a tuple of float tensors.
    ``kernel``: the name for the record; empty for what only reads a shape.
    """

    target: Callable[..., Any] | nn.Module | str
    args: tuple[Any, ...]
    kernel: str
    out: QParams | None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    in_range: bool = False
    each_item: bool = False
    float_dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class LowerRule:
    """``pattern``: for each operator of the chain, the spellings it may have, in dataflow order.

    >>> rule = LowerRule("relu", ((torch.relu, "relu", nn.ReLU),), lambda site: None)
    >>> rule.anchors == (torch.relu, "relu", nn.ReLU)
    True
    """

    name: str
    pattern: tuple[tuple[OpKey, ...], ...]
    build: Callable[[Site], Emit | Reason | None]

    @property
    def anchors(self) -> tuple[OpKey, ...]:
        """The spellings of the first operator; tables are indexed by them."""
        return self.pattern[0]


# Chains of float operators in a reference model: from a node to the site of a rule.
#
# Each call looks at one node and at most as many followers as the longest pattern has operators.

RuleIndex = dict[Any, list[LowerRule]]


@lru_cache(maxsize=16)
def index_rules(rules: tuple[LowerRule, ...]) -> RuleIndex:
    """Rules by the spelling of their first operator: longest pattern first, then table order.

    >>> from torch.nn import functional as F
    >>> short = LowerRule("a", ((F.relu,),), lambda site: None)
    >>> long = LowerRule("b", ((F.relu,), (F.dropout,)), lambda site: None)
    >>> [rule.name for rule in index_rules((short, long))[F.relu]]
    ['b', 'a']
    """
    index: RuleIndex = {}
    for rule in sorted(rules, key=lambda rule: -len(rule.pattern)):
        for key in rule.anchors:
            index.setdefault(key, []).append(rule)
    return index


def steps_of(graph_module: GraphModule, node: Node) -> tuple[Step, ...]:
    """The operators of one node: a single one, or those of the fused module that it calls."""
    if node.op == "call_module":
        module = get_module(graph_module, str(node.target))
        return tuple(_step(part, node) for part in _parts(module))
    if node.op in ("call_function", "call_method"):
        return (Step(node.target, node),)
    return ()


def _parts(module: nn.Module) -> tuple[Any, ...]:
    if isinstance(module, ConvAdd2d):
        return (module[0], module.add)
    if isinstance(module, ConvAddReLU2d):
        return (module[0], module.add, module.relu)
    return tuple(module) if isinstance(module, nn.Sequential) else (module,)


def _step(part: Any, node: Node) -> Step:
    return Step(type(part), node, part) if isinstance(part, nn.Module) else Step(part, node)


def site_of(
    graph_module: GraphModule,
    steps: tuple[Step, ...],
    rule: LowerRule,
    engine: EngineInfo,
    described: DTypeConfig | None = None,
) -> Site | None:
    """The site of ``rule`` that starts at a node with ``steps``, or ``None`` if its chain is not there."""
    wanted = len(rule.pattern)
    while len(steps) < wanted:
        follower = _only_follower(steps[-1].node, engine)
        more = steps_of(graph_module, follower) if follower is not None else ()
        if not more:
            return None
        steps += more
    if len(steps) != wanted:
        return None
    if any(step.key not in keys for step, keys in zip(steps, rule.pattern, strict=True)):
        return None
    quantize = _only_quantize(steps[-1].node, engine)
    out = qparams_of(quantize) if quantize is not None else None
    return Site(graph_module, steps, quantize, out, engine, described)


def quantizes(node: Node, engine: EngineInfo) -> bool:
    """Whether ``node`` quantizes in a way that the kernels of ``engine`` may do themselves."""
    return is_quantize(node) or (engine.as_described and is_described_quantize(node))


def _only_follower(node: Node, engine: EngineInfo) -> Node | None:
    """The one operator that reads ``node``, as its first argument."""
    if len(node.users) != 1:
        return None
    follower = next(iter(node.users))
    if quantizes(follower, engine) or not follower.args or follower.args[0] is not node:
        return None
    return follower if follower.op.startswith("call_") else None


def _only_quantize(node: Node, engine: EngineInfo) -> Node | None:
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    return user if quantizes(user, engine) else None
