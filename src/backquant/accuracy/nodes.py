"""Running a graph node by node, and how long its values are needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from backquant.calibrate.feed import bound_arguments, check_values
from backquant.errors import InputError, first_line


def run_node(module: fx.GraphModule, node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    """What ``node`` computes; ``value`` gives that of the nodes that it reads.

    >>> import torch
    >>> gm = fx.symbolic_trace(torch.nn.ReLU())
    >>> run_node(gm, list(gm.graph.nodes)[1], lambda node: torch.tensor([-1.0, 1.0]))
    tensor([0., 1.])
    """
    if node.op == "get_attr":
        return attrgetter(str(node.target))(module)
    args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
    if node.op == "output":
        return args[0]
    if node.op == "call_module":
        return module.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = node.target
    return target(*args, **kwargs)


def placeholders(
    module: fx.GraphModule, batch: Any, index: int, measured: Collection[str] | None = None
) -> dict[str, Any]:
    """What the inputs of the graph are for a batch, by the name of the node. ``measured``: those that are
    quantized, in which infinite values are refused (``measured_inputs``); ``None``: all.

    Raises ``InputError`` when it does not fit, ``CalibrationError`` when it holds values that are not finite.

    >>> placeholders(fx.symbolic_trace(lambda x, y: x + y), {"x": 1, "y": 2}, 0)
    {'x': 1, 'y': 2}
    """
    _ = module.code  # whose signature is that of the model
    bound = bound_arguments(module, batch, index)
    check_values(bound, index, measured)
    bound.apply_defaults()
    found: dict[str, Any] = {}
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        name = str(node.target).lstrip("*")
        try:
            found[node.name] = bound.arguments[name]
        except KeyError as error:
            what = f"batch {index} has no {name!r}: {first_line(error)}"
            raise InputError(what, where=f"batch {index}", fix=f"pass {name!r}") from error
    return found


def last_uses(reads: Iterable[tuple[str, Iterable[str]]]) -> Mapping[str, list[str]]:
    """Which values are read for the last time at each step: ``reads`` are steps with what they read.

    >>> last_uses([("a", []), ("b", ["a"]), ("c", ["a"])])
    {'c': ['a']}
    """
    last: dict[str, str] = {}
    for step, names in reads:
        last.update(dict.fromkeys(names, step))
    found: dict[str, list[str]] = {}
    for name, step in last.items():
        found.setdefault(step, []).append(name)
    return found
