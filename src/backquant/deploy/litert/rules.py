"""All rules, and the operators that are taken apart first because there is none for them."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx
from torch._ops import OpOverload

from backquant.deploy.litert import arithmetic, convolutions, moves, norms, pools, products
from backquant.deploy.litert.call import Call, Rule, Table, bound_arguments
from backquant.deploy.litert.values import UnsupportedError, Value
from backquant.deploy.program import Program, origins_of_stacks
from backquant.graph.quiet import quiet

__all__ = ["RULES", "decomposed", "unknown"]

RULES: Table = {
    **convolutions.TABLE,
    **products.TABLE,
    **arithmetic.TABLE,
    **moves.TABLE,
    **norms.TABLE,
    **pools.TABLE,
}
_PARTS = {**moves.PARTS, **norms.PARTS}
_OURS = ("quantized_decomposed", "backquant")
_ROUNDS = 4  # what a decomposition gives may have one itself


def _taken(call: Call) -> Value:
    """An item of what gives several results."""
    source, index = call.node.args
    assert isinstance(source, fx.Node) and isinstance(index, int)
    if source.target not in _PARTS:
        raise UnsupportedError("LiteRT has no operator for it")
    call.args = bound_arguments(source)
    return _PARTS[source.target](call, source, index)


def _moves(call: Call) -> bool:
    source = call.node.args[0]
    return isinstance(source, fx.Node) and source.target in moves.PARTS


RULES[operator.getitem] = Rule(_taken, _moves, keeps=True, moves=True)


def decomposed(program: Program) -> Program:
    """``program`` with operators that have no rule written as those that torch computes them with."""
    known = torch.export.default_decompositions()
    for _ in range(_ROUNDS):
        targets = {node.target for node in unknown(program)}
        table = {target: known[target] for target in targets if target in known}
        if not table:
            return program
        with quiet(), torch.no_grad():
            exported = program.exported.run_decompositions(table)
        program = replace(program, exported=exported, origins=origins_of_stacks(exported.graph))
    return program


def unknown(program: Program) -> list[fx.Node]:
    """The calls without a rule that depend on an input."""
    depends: set[fx.Node] = set()
    inputs = set(program.exported.graph_signature.user_inputs)
    found = []
    for node in program.exported.graph.nodes:
        if node.op == "placeholder":
            if node.name in inputs:
                depends.add(node)
        elif depends.intersection(node.all_input_nodes):
            depends.add(node)
            if node.op == "call_function" and _lacks_rule(node):
                found.append(node)
    return found


def _lacks_rule(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if target.namespace in _OURS or target in RULES:
        return False
    if not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple)):
        return False  # a number
    return target not in _PARTS
