"""Operators that move or select values: they run on the integers as they are, under any qparams.

1. Reshaping, slicing, repeating: the same operator on the integer tensor.
2. Dropout in evaluation mode and identity: nothing runs.
3. Concatenation; parts whose qparams differ from the others' are requantized.
4. Splitting: each item keeps the qparams.
5. Sizes: read from the integer tensor; nothing is dequantized for them.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import nn
from torch.fx import Node
from torch.nn import functional as F

from backquant.engines.tables.arguments import (
    Joined,
    bind,
    first_operand,
    joined,
    refuse_float_input,
)
from backquant.lower.kernels.join import cat
from backquant.lower.rule import IDENTITY, Emit, LowerRule, Site, operand
from backquant.match.plan import Reason
from backquant.operators import all_operators, spellings
from backquant.reason_codes import ReasonCode

_SPLITS: tuple[Any, ...] = spellings("chunk", "split", "unbind", "tensor_split")
_CATS: tuple[Any, ...] = spellings("cat")
_STACKS: tuple[Any, ...] = spellings("stack")
_NOTHING: tuple[Any, ...] = spellings("identity")
# Whatever else moves the values of its first argument. (Pooling has kernels of its own.)
_OWN_RULES = (*_SPLITS, *_CATS, *_STACKS, *_NOTHING)
_MOVING = [o for o in all_operators() if o.moves_values and o.family == "shape" and o.calls]
_MOVES: tuple[Any, ...] = tuple(
    spelling
    for moving in _MOVING
    for spelling in (*moving.functions, *moving.methods)
    if spelling not in _OWN_RULES
)
_MODULES: tuple[Any, ...] = tuple(
    module for moving in _MOVING for module in moving.modules if module not in _OWN_RULES
)
_DROPOUTS: tuple[Any, ...] = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_F_DROPOUTS: tuple[Any, ...] = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
_SIZES: tuple[Any, ...] = ("size", "dim", "numel", "ndimension", len)
_ATTRIBUTES = ("shape", "ndim", "device")


def passthrough_rules() -> list[LowerRule]:
    """Rules for everything that only moves values.

    >>> {rule.name for rule in passthrough_rules()} >= {"move", "cat", "split", "size", "dropout"}
    True
    """
    return [
        LowerRule("move", (_MOVES,), _move),
        LowerRule("move module", (_MODULES,), _move_module),
        LowerRule("getitem", ((operator.getitem,),), _item),
        LowerRule("identity", (_NOTHING,), _nothing),
        LowerRule("dropout", (_DROPOUTS,), _dropout),
        LowerRule("functional dropout", (_F_DROPOUTS,), _functional_dropout),
        LowerRule("cat", (_CATS,), _join),
        LowerRule("stack", (_STACKS,), _join),
        LowerRule("split", (_SPLITS,), _split),
        LowerRule("size", (_SIZES,), _size),
        LowerRule("attribute", ((getattr,),), _attribute),
    ]


def _with_integer(site: Site, source: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The site's arguments, its first tensor replaced by the integers of ``source``."""
    node = site.node
    if node.args:
        return (source, *node.args[1:]), dict(node.kwargs)
    return (), {**node.kwargs, "input": source}


def _move(site: Site) -> Emit | Reason:
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    args, kwargs = _with_integer(site, x.node)
    target: Any = site.node.target
    name = target if isinstance(target, str) else target.__name__
    return Emit(target, args, f"aten.{name}", x.qparams, kwargs, in_range=True)


def _move_module(site: Site) -> Emit | Reason:
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    name = type(site.module).__name__
    return Emit(site.module, (x.node,), f"{name} on integers", x.qparams, in_range=True)


def _item(site: Site) -> Emit | Reason:
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    if any(operand(node).is_integer for node in site.node.all_input_nodes[1:]):
        return site.refuse(ReasonCode.INDEX, "an index that is a quantized tensor", "a plain index")
    args, kwargs = _with_integer(site, x.node)
    return Emit(operator.getitem, args, "aten.slice", x.qparams, kwargs, in_range=True)


def _nothing(site: Site) -> Emit | Reason:
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    return Emit(IDENTITY, (x.node,), "", x.qparams, in_range=True)


def _dropout(site: Site) -> Emit | Reason:
    if site.module.training:
        return site.refuse(
            ReasonCode.TRAINING, "dropout in training mode", "evaluation mode: model.eval()"
        )
    return _nothing(site)


def _functional_dropout(site: Site) -> Emit | Reason:
    found = bind(
        site.node, ("input", "p", "training", "inplace"), {"p": 0.5, "training": True, "inplace": 0}
    )
    if found is None or found["training"] is not False:
        return site.refuse(ReasonCode.TRAINING, "dropout that may be training", "training=False")
    return _nothing(site)


def _join(site: Site) -> Emit | Reason:
    found = joined(site)
    if not isinstance(found, Joined):
        return found
    nodes, qparams, dim = found
    target: Any = site.node.target
    if len(set(qparams)) == 1:
        args = (nodes, dim)
        return Emit(target, args, f"aten.{target.__name__}", qparams[0], in_range=True)
    if site.out is None or target not in _CATS:
        return site.refuse(
            ReasonCode.OTHER_QPARAMS, "inputs with different qparams", "equal qparams"
        )
    scales, zero_points = [q.scale for q in qparams], [q.zero_point for q in qparams]
    fits = [q == site.out for q in qparams]
    literals = (nodes, scales, zero_points, fits, dim, *site.out.literals)
    return Emit(cat, literals, "aten.cat(requantized)", site.out, in_range=True)


def _split(site: Site) -> Emit | Reason:
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    if any(
        user.target is not operator.getitem or isinstance(user.args[1], slice)
        for user in site.node.users
    ):
        return site.refuse(
            ReasonCode.WHOLE_TUPLE, "a list of parts that is used whole", "items of the list"
        )
    args, kwargs = _with_integer(site, x.node)
    target: Any = site.node.target
    name = target if isinstance(target, str) else target.__name__
    return Emit(target, args, f"aten.{name}", x.qparams, kwargs, in_range=True, each_item=True)


def _size(site: Site) -> Emit | Reason:
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    args, kwargs = _with_integer(site, x.node)
    return Emit(site.node.target, args, "", None, kwargs)


def _attribute(site: Site) -> Emit | Reason:
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    if site.node.args[1] not in _ATTRIBUTES:
        return site.refuse(ReasonCode.ATTRIBUTE, f".{site.node.args[1]}", f"one of {_ATTRIBUTES}")
    return _size(site)
