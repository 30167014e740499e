"""The kinds of entry that operator families are written in.

Each function gives a fresh ``BackendPatternConfig`` without dtype configs; ``admit`` adds those,
copies of their own to every entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from backquant.backend_config import BackendPatternConfig, DTypeConfig, ObservationType
from backquant.graph.export import Call


def admit(
    entries: Iterable[BackendPatternConfig], dtype_configs: Sequence[DTypeConfig]
) -> list[BackendPatternConfig]:
    """``entries``, each admitted in ``dtype_configs``.

    >>> import torch
    >>> [e] = admit([observed(torch.nn.ELU)], [DTypeConfig(input_dtype=torch.quint8)])
    >>> e.pattern.__name__, e.dtype_configs[0].input_dtype
    ('ELU', torch.quint8)
    """
    return [entry.set_dtype_configs([c.copy() for c in dtype_configs]) for entry in entries]


def observed(pattern: Any) -> BackendPatternConfig:
    """``pattern`` computes new values: its output gets qparams of its own.

    >>> import torch
    >>> observed(torch.nn.ELU).observation_type.name
    'OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT'
    """
    return BackendPatternConfig(pattern).set_observation_type(
        ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
    )


def sharing(pattern: Any) -> BackendPatternConfig:
    """``pattern`` rearranges, selects or averages values: its output keeps the input's qparams.

    >>> sharing("reshape").observation_type.name
    'OUTPUT_SHARE_OBSERVER_WITH_INPUT'
    """
    return BackendPatternConfig(pattern).set_observation_type(
        ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
    )


def functional(
    pattern: Any, *, weight: int, bias: int | None = None, activation: int | None = None
) -> BackendPatternConfig:
    """A function that takes its weight (and bias) as arguments at these positions.

    >>> import torch
    >>> functional(torch.nn.functional.linear, weight=1, bias=2)._input_type_to_index
    {'weight': 1, 'bias': 2}
    """
    places = {"weight": weight, "bias": bias, "input": activation}
    return observed(pattern)._set_input_type_to_index(
        {name: place for name, place in places.items() if place is not None}
    )


def swapped(
    pattern: Any, root: type[nn.Module], reference: type[nn.Module]
) -> BackendPatternConfig:
    """A module whose ``root`` becomes ``reference`` when the model is converted.

    >>> import torch
    >>> swapped(torch.nn.Linear, torch.nn.Linear, torch.nn.Identity).root_module.__name__
    'Linear'
    """
    return observed(pattern).set_root_module(root).set_reference_quantized_module(reference)


def fusion(
    pattern: tuple[Any, ...], fused: type[nn.Module], fuser: Callable[..., Any]
) -> BackendPatternConfig:
    """A sequence in forward order that ``fuser(is_qat, *parts)`` turns into ``fused``.

    >>> import torch
    >>> def fuse(is_qat, linear, relu):
    ...     return torch.nn.Sequential(linear, relu)
    >>> fusion((torch.nn.Linear, torch.nn.ReLU), torch.nn.Sequential, fuse).fused_module.__name__
    'Sequential'
    """
    return observed(pattern).set_fused_module(fused).set_fuser_method(fuser)


# How the call of an exported graph reads in a model: for records whose aten overloads take other arguments.
#
# A record says so itself: ``respelled`` is the call that a symbolic trace would show, ``rebuilt`` the module
# that holds the tensors of the call.


def function_call(target: Any, *args: Any, **kwargs: Any) -> Call:
    """A call without trailing arguments that are ``None``.

    >>> function_call(torch.relu, "x", None).args
    ('x',)
    """
    values = list(args)
    while values and values[-1] is None:
        values.pop()
    return Call("call_function", target, tuple(values), kwargs)


def method_call(name: str, x: Any, sizes: Any) -> Call:
    """A method that takes its sizes or axes one by one.

    >>> method_call("view", "x", [2, -1]).args
    ('x', 2, -1)
    """
    return Call("call_method", name, (x, *sizes))


def given(*values: Any) -> bool:
    """Whether these are tensors of the model, or absent."""
    return all(value is None or isinstance(value, torch.Tensor) for value in values)


def filled(module: nn.Module, **tensors: Any) -> nn.Module:
    """``module`` with the tensors as its parameters."""
    for name, value in tensors.items():
        if value is not None and not isinstance(value, nn.Parameter):
            value = nn.Parameter(value, requires_grad=False)  # noqa: PLW2901
        setattr(module, name, value)
    return module


def sizes(value: Any) -> Any:
    """A tuple, or one number for all dimensions."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return values[0] if len(values) == 1 else values


# What decomposition makes of an operator, and how it reads as one call again.
#
# Export keeps ``linear``, ``conv2d``, ``batch_norm`` and the like; ``run_decompositions`` does not. The
# record of an operator says in which call each of its decompositions ends; here is what reading them takes.


#: An overload and its arguments.
AtenCall: TypeAlias = tuple[Any, tuple[Any, ...]]


@dataclass(frozen=True)
class Decomposition:
    """Calls that are one operator together, by the overload of the last one.

    ``read``: that operator's call, from the last node; ``None`` where the calls are something else.
    ``is_item``: the operator's result is item 0 of the last call. ``stands_for_it``: an entry of a backend
    that names the overload means the operator.
    """

    ends_in: Any
    read: Callable[[fx.Node], AtenCall | None]
    is_item: bool = False
    stands_for_it: bool = False


def first_result(ends_in: Any, read: Callable[..., AtenCall]) -> Decomposition:
    """An operator that gives a tuple, of which item 0 is read; ``read`` takes its arguments."""
    return Decomposition(ends_in, lambda node: read(*node.args), is_item=True)


def is_parameter(value: Any) -> bool:
    """Whether it is a parameter of the exported model."""
    return isinstance(value, fx.Node) and value.op == "placeholder" and value.name.startswith("p_")


def is_state(value: Any) -> bool:
    """Whether it is a tensor of the exported model: a parameter, a buffer or a constant."""
    names = ("p_", "b_", "c_")
    return isinstance(value, fx.Node) and value.op == "placeholder" and value.name.startswith(names)


def shape_of(value: Any) -> tuple[Any, ...] | None:
    """The shape of a node's tensor; ``None`` for what is no tensor."""
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
    return tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else None


def calls(value: Any, target: Any) -> bool:
    """Whether it is a node that calls ``target``."""
    return isinstance(value, fx.Node) and value.target is target


def with_target(values: Any, target: Any) -> tuple[Any, Any]:
    """(other, call), where ``call`` calls ``target``; ``(None, None)`` if neither value does."""
    if len(values) != 2:
        return None, None
    for one, other in (values, tuple(reversed(values))):
        if calls(other, target) and isinstance(one, fx.Node):
            return one, other
    return None, None
