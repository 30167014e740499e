"""Models that write their parameters when they are called.

Some do so at their first call in evaluation mode only: RWKV divides weights by powers of two, once, and
remembers that it has. The parameters are the user's: a call is stopped before it writes one, and what is
quantized is a copy with tensors of its own, as it is after one call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from backquant.errors import InputError
from backquant.graph.clone import own_in_place
from backquant.graph.interception import DispatchMode


class WritesParameterError(InputError):
    """A call is about to change a parameter of the model."""


class unwritten_parameters(DispatchMode):  # noqa: N801 (used as a function)
    """While this is open, a write to a parameter of ``model`` raises before it happens; other memory that it
    is given (``parameter.data = ...``) is taken from it again, and the end raises.

    >>> linear = nn.Linear(2, 2)
    >>> with torch.no_grad(), unwritten_parameters(linear):
    ...     linear.weight.mul_(2)
    Traceback (most recent call last):
        ...
    backquant.graph.settle.WritesParameterError: the model changes its parameter 'weight' when it is called
      where  aten.mul_.Tensor
      fix    model.eval()(*example_inputs) once before, or compute the new value beside the parameter
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        places = {name: (p, _place(p)) for name, p in model.named_parameters()}
        self.names = {place: name for name, (_, place) in places.items() if place}
        self._held = {name: (p, p.data, place) for name, (p, place) in places.items() if place}

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        others = [(n, p, data) for n, (p, data, place) in self._held.items() if _place(p) != place]
        for _, parameter, data in others:
            parameter.data = data
        if others and error is None:
            raise _writes(others[0][0], "parameter.data = ...")

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # higher-order operators (torch.cond) have no schema; their branches may not write to captured tensors
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            self._check(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            values = given if isinstance(given, (list, tuple)) else (given,)
            tensors = (value for value in values if isinstance(value, torch.Tensor))
            for name in filter(None, (self.names.get(_place(tensor)) for tensor in tensors)):
                raise _writes(name, str(func))


def _writes(name: str, how: str) -> WritesParameterError:
    return WritesParameterError(
        f"the model changes its parameter {name!r} when it is called",
        where=how,
        fix="model.eval()(*example_inputs) once before, or compute the new value beside the parameter",
    )


def _place(tensor: torch.Tensor) -> int:
    """Where its memory begins; 0 for tensors that have none (on the meta device, fake ones)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def settle(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give ``model``, a copy that nobody else uses, tensors of its own, and call it once.

    >>> class Halving(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weight, self.is_halved = nn.Parameter(torch.ones(1)), False
    ...     def forward(self, x):
    ...         if not self.is_halved:
    ...             self.weight.div_(2)
    ...             self.is_halved = True
    ...         return x * self.weight
    >>> model = Halving()
    >>> weight = model.weight
    >>> settle(model, (torch.ones(1),), {})
    >>> weight.item(), model.weight.item(), model.is_halved
    (1.0, 0.5, True)
    """
    own_in_place(model)
    with torch.no_grad():
        model(*args, **kwargs)
