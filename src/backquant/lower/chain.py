"""Chains of float operators in a reference model: from a node to the site of a rule.

Each call looks at one node and at most as many followers as the longest pattern has operators.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from backquant.backend_config import DTypeConfig
from backquant.graph import get_module
from backquant.lower.engine_info import EngineInfo
from backquant.lower.qdq import is_described_quantize, is_quantize, qparams_of
from backquant.lower.rule import LowerRule, Site, Step
from backquant.nn.intrinsic import ConvAdd2d, ConvAddReLU2d

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


def quantizes(node: Any, engine: EngineInfo) -> bool:
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
