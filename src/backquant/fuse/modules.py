"""Which modules a fuser gets for the nodes of a pattern, and in which shape or by which names.

The rules are PyTorch's: a called module is passed as it is; ``F.relu`` becomes an ``nn.ReLU`` in the
mode of the root; another function or method is passed as it stands; an argument that is no
operator becomes ``MatchAllNode``. *Different:* a ``SequentialFuser`` puts modules together and can
do nothing with a function, so it gets ``F.leaky_relu(x, 0.2)`` as ``nn.LeakyReLU(0.2)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from backquant.backend_config import (
    BackendPatternConfig,
    GraphPattern,
    MatchAllNode,
    SequentialFuser,
)
from backquant.backend_config.pattern import NormalPattern
from backquant.operators import module_for_call


def run_fuser(
    config: BackendPatternConfig,
    is_qat: bool,
    bound: tuple[fx.Node | None, ...],
    modules: Mapping[str, nn.Module],
    root: nn.Module,
) -> Any:
    """What ``config.fuser_method`` gives for the nodes that are bound to the pattern.

    The fuser of a graph pattern gets its operators by name, ``f(is_qat, conv=…, sum=…)``; a
    ``SequentialFuser`` gets the modules among them in the order of writing.

    >>> entry = BackendPatternConfig((nn.Linear, nn.ReLU)).set_fuser_method(
    ...     lambda is_qat, linear, relu: nn.Sequential(linear, relu))
    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    >>> nodes = tuple(node for node in gm.graph.nodes if node.op == "call_module")
    >>> len(run_fuser(entry, False, nodes, dict(gm.named_modules()), gm.get_submodule("0")))
    2
    """
    fuser = config.fuser_method
    assert fuser is not None
    arguments = fuser_arguments(config, bound, modules, root)
    pattern = config.pattern
    if not isinstance(pattern, GraphPattern):
        return fuser(is_qat, *arguments)
    by_name = pattern.named(arguments)
    if isinstance(fuser, SequentialFuser):
        parts = (by_name[name] for name in pattern.operators)
        return fuser(is_qat, *(part for part in parts if isinstance(part, nn.Module)))
    return fuser(is_qat, **{name: by_name[name] for name in pattern.operators})


def fuser_arguments(
    config: BackendPatternConfig,
    bound: tuple[fx.Node | None, ...],
    modules: Mapping[str, nn.Module],
    root: nn.Module,
) -> list[Any]:
    """The arguments of ``config.fuser_method`` after ``is_qat``, for each node of a graph pattern.

    For a forward pattern ``(conv, bn, relu)``: three modules in that order. For a reversed pattern
    ``(relu, (bn, conv))``: a module and a tuple.

    >>> entry = BackendPatternConfig((nn.Linear, nn.ReLU))
    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    >>> nodes = tuple(node for node in gm.graph.nodes if node.op == "call_module")
    >>> fuser_arguments(entry, nodes, dict(gm.named_modules()), gm.get_submodule("0"))
    [Linear(in_features=1, out_features=1, bias=True), ReLU()]
    """
    values = [_module(node, modules, root) for node in bound]
    if isinstance(config.fuser_method, SequentialFuser):
        values = [_called_as_module(v, n, root) for v, n in zip(values, bound, strict=True)]
    if config._pattern_complex_format is None:
        return values
    pattern = config.normal_pattern
    inputs = pattern.anchor.inputs or ()
    return [values[-1], *(_nested(pattern, values, position) for position in inputs)]


def parts_of_call(
    config: BackendPatternConfig, bound: tuple[fx.Node | None, ...]
) -> tuple[Any, ...]:
    """What two calls have to share for their fused modules to be alike; hashable.

    Modules count by path. Inputs of the pattern (``MatchAllNode``) do not count: they are arguments
    of the call.

    >>> entry = BackendPatternConfig((nn.Linear, nn.ReLU))
    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    >>> parts_of_call(entry, tuple(node for node in gm.graph.nodes if node.op == "call_module"))
    ('0', '1')
    """
    kinds = (node.kind for node in config.normal_pattern.nodes)
    return tuple(
        None if node is None or kind == "any" else node.target
        for node, kind in zip(bound, kinds, strict=True)
    )


def _nested(pattern: NormalPattern, values: list[Any], position: int) -> Any:
    inputs = pattern.nodes[position].inputs
    if inputs is None:
        return values[position]
    return (values[position], *(_nested(pattern, values, item) for item in inputs))


def _module(node: fx.Node | None, modules: Mapping[str, nn.Module], root: nn.Module) -> Any:
    if node is None:
        return MatchAllNode
    if node.op == "call_module":
        return modules[str(node.target)]
    if node.op == "call_function" and node.target is F.relu:
        return nn.ReLU().train(root.training)
    return node.target if node.op in ("call_function", "call_method") else MatchAllNode


def _called_as_module(value: Any, node: fx.Node | None, root: nn.Module) -> Any:
    """The module with the settings of a call; ``value`` itself where there are none, or they are
    computed.
    """
    if node is None or isinstance(value, nn.Module) or len(node.all_input_nodes) != 1:
        return value
    options = {name: option for name, option in node.kwargs.items() if name != "input"}
    module = module_for_call(node.target, node.args[1:], options)
    return value if module is None else module.train(root.training)
