"""Arguments of a call in the order of the callee's parameters, however they were spelled."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.operator_schemas import get_signature_for_torch_op

#: Of an argument, by the number of stars before its name.
KINDS = (
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
)


def signature_of(module: fx.GraphModule) -> inspect.Signature:
    """What ``module.forward`` takes, without code being generated for it, where the graph itself says so.

    >>> signature_of(fx.symbolic_trace(lambda x, scale=2.0: x * scale))
    <Signature (x, scale=2.0)>
    """
    if type(module.graph._codegen) is not fx.graph.CodeGen:
        module.recompile()  # a deferred graph module has no signature before
        return inspect.signature(module.forward)
    return inspect.Signature(parameters_of(module.graph))


def parameters_of(graph: fx.Graph) -> list[inspect.Parameter]:
    """What a graph takes: ``*args`` and ``**kwargs`` as in source, keyword-only after them."""
    parameters: list[inspect.Parameter] = []
    for node in graph.find_nodes(op="placeholder"):
        target = str(node.target)
        name = target.lstrip("*")
        kind: Any = KINDS[len(target) - len(name)]
        if kind is KINDS[0] and any(p.kind is KINDS[1] for p in parameters):
            kind = inspect.Parameter.KEYWORD_ONLY
        default = node.args[0] if node.args else inspect.Parameter.empty
        annotation = inspect.Parameter.empty if node.type is None else node.type
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
    return parameters


def ordered_arguments(node: fx.Node, module: nn.Module | None = None) -> tuple[Any, ...] | None:
    """The arguments of a call that carry a value, in the callee's order.

    Keyword arguments take their places; ``inplace`` and arguments equal to their defaults are left
    out. ``None`` when the callee's parameters are not known (methods, some builtins) or when an
    argument that is left out stands before one that is not.

    Args:
        node: a call.
        module: the called module, for ``call_module`` nodes.

    >>> import torch
    >>> def f(x, y):
    ...     return torch.relu(torch.add(input=x, other=y))
    >>> [ordered_arguments(n) for n in fx.symbolic_trace(f).graph.nodes if n.name == "add"]
    [(x, y)]
    """
    if node.op == "call_method":
        return tuple(node.args) if not node.kwargs else None
    callee = module.forward if module is not None else node.target
    if not callable(callee):
        return None
    key = type(module).forward if module is not None else callee
    for signature in _signatures(key):
        found = _bind(signature, node, skip_self=module is not None)
        if found is not None:
            return found
    return None


@lru_cache(maxsize=4096)
def _signatures(callee: Callable[..., Any]) -> tuple[inspect.Signature, ...]:
    try:
        return (inspect.signature(callee),)
    except (TypeError, ValueError):
        return tuple(get_signature_for_torch_op(callee) or ())


def _bind(
    signature: inspect.Signature, node: fx.Node, *, skip_self: bool
) -> tuple[Any, ...] | None:
    args = (None, *node.args) if skip_self else node.args
    try:
        bound = signature.bind(*args, **node.kwargs)
    except TypeError:
        return None
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.VAR_KEYWORD in kinds:
        return None
    values: list[Any] = []
    complete = True
    for name, parameter in list(signature.parameters.items())[1 if skip_self else 0 :]:
        value = bound.arguments.get(name, parameter.default)
        if name == "inplace" or _is_default(value, parameter.default):
            complete = False
        elif not complete:
            return None
        else:
            values.append(value)
    return tuple(values)


_NO_VALUES = ("self", "inplace", "out", "_stacklevel")


@lru_cache(maxsize=4096)
def argument_counts(callee: Any) -> range | None:
    """How many arguments a call of this function, method (by name) or module class may have, ``inplace`` and
    ``out`` not counted; ``None`` where nothing says so. A method may take more: sizes one by one.

    >>> argument_counts(torch.add), argument_counts("softmax"), argument_counts(nn.ReLU)
    (range(2, 4), range(2, 4), range(1, 2))
    """
    if isinstance(callee, torch._ops.OpOverload):
        arguments = callee._schema.arguments
        return range(sum(not a.has_default_value() for a in arguments), len(arguments) + 1)
    is_class = isinstance(callee, type)
    found = _signatures(callee.forward) if is_class else _named_signatures(callee)
    if not found or (not is_class and any(map(_takes_anything, found))):
        return None
    known = [list(each.parameters.values()) for each in found]
    # a tensor's own place is called self, too
    values = [each[1:] if is_class else each for each in known]
    values = [
        [p for i, p in enumerate(each) if not i or p.name not in _NO_VALUES] for each in values
    ]
    fewest = min(sum(p.default is inspect.Parameter.empty for p in each) for each in values)
    return range(fewest, max(map(len, values)) + 1)


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (
        isinstance(value, (bool, int, float, str, type(None))) and value == default
    )


class Argument(NamedTuple):
    """The value of an argument: as it is given, or the parameter's default."""

    value: Any


def argument_named(node: fx.Node, name: str) -> Argument | None:
    """The argument of a function or method by its parameter's name; ``None`` if there is none.

    >>> gm = fx.symbolic_trace(lambda x: nn.functional.interpolate(x, scale_factor=2).mean((2, 3)))
    >>> up, mean = [n for n in gm.graph.nodes if n.op.startswith("call")]
    >>> argument_named(up, "mode"), argument_named(mean, "dim"), argument_named(mean, "mode")
    (Argument(value='nearest'), Argument(value=(2, 3)), None)
    """
    if name in node.kwargs:
        return Argument(node.kwargs[name])
    for signature in _named_signatures(node.target):
        kwargs = {key: v for key, v in node.kwargs.items() if key in signature.parameters}
        try:
            bound = signature.bind(*node.args, **kwargs)
        except TypeError:
            continue
        bound.apply_defaults()
        if name in bound.arguments:
            return Argument(bound.arguments[name])
    known = any(name in signature.parameters for signature in _named_signatures(node.target))
    return Argument(None) if known else None  # another overload has it: x.mean() has no dim


def defaults_of(callee: Any) -> dict[str, Any]:
    """The defaults of a module class, function or method, by parameter.

    >>> defaults_of(nn.Upsample)["mode"], defaults_of("leaky_relu")["negative_slope"]
    ('nearest', 0.01)
    """
    signatures = _signatures(callee) if isinstance(callee, type) else _named_signatures(callee)
    return {
        name: parameter.default
        for signature in signatures
        for name, parameter in signature.parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


@lru_cache(maxsize=4096)
def _named_signatures(callee: Any) -> tuple[inspect.Signature, ...]:
    """Signatures with the names of all parameters: of methods and of functions that dispatch, too."""
    found = _signatures(callee) if callable(callee) else ()
    if found and not any(_takes_anything(signature) for signature in found):
        return found
    name = callee if isinstance(callee, str) else getattr(callee, "__name__", "")
    alike = getattr(torch, name.rstrip("_"), None) or getattr(
        torch.ops.aten, name.rstrip("_"), None
    )
    return tuple(get_signature_for_torch_op(alike) or ()) if callable(alike) else ()


def _takes_anything(signature: inspect.Signature) -> bool:
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    return bool(kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD})
