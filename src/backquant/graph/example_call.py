"""What a model does with its example inputs: one call, watched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from backquant.errors import InputError
from backquant.graph.clone import own_buffers
from backquant.graph.costs import MultiplyAdds
from backquant.graph.example import call, check_inputs
from backquant.graph.interception import Draws
from backquant.graph.outside import codes_run, generators_as_before, outside_of
from backquant.graph.settle import WritesParameterError
from backquant.graph.state import Snapshot, state_of


class ExampleCall(NamedTuple):
    """A call of a model: the inputs, what it gave, the operators that drew random numbers (as
    ``Draws.found``), its multiply-adds, 0 where nothing counts them, what it leaves in the model for the
    next call (as ``state_of``), and outside of it (as ``outside_of``)."""

    inputs: Any
    output: Any
    drawn: Mapping[str, str]
    multiply_adds: int
    state: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    outside: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    @classmethod
    @generators_as_before()
    def of(cls, model: nn.Module, inputs: Any) -> ExampleCall:
        """Call ``model`` on example inputs. Changes nothing in it, and raises as ``check_inputs``.

        >>> import torch
        >>> ExampleCall.of(nn.Linear(3, 2), torch.zeros(1, 3)).multiply_adds
        6
        """
        counter = MultiplyAdds()
        try:
            return cls._counted(model, inputs, counter, counter)
        except WritesParameterError:
            raise
        except InputError:
            pass  # counting takes operators apart, which may be what failed
        return cls._counted(model, inputs, MultiplyAdds())

    @classmethod
    def _counted(
        cls, model: nn.Module, inputs: Any, counter: MultiplyAdds, *modes: MultiplyAdds
    ) -> ExampleCall:
        draws, trial = Draws(), own_buffers(model)
        before = Snapshot(trial)
        with codes_run() as ran:
            output = check_inputs(model, inputs, *modes, draws, trial=trial)
        state = state_of(model, trial, inputs, before.changed(), output)
        outside = outside_of(model, inputs, output, ran)
        return cls(inputs, output, draws.found, counter.count, state, outside)


def first_calls(model: nn.Module, paths: Iterable[str], inputs: Any) -> dict[str, Any]:
    """The example inputs of the parts at ``paths``: those of each part's first call, in one call of ``model``
    in evaluation mode. Parts that are not called, or called with positional and keyword arguments, have
    none; where the call fails, no part has any.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    >>> first_calls(model, ["1"], torch.zeros(5, 3))["1"][0].shape
    torch.Size([5, 2])
    """
    copied, found = own_buffers(model).eval(), dict[str, Any]()

    def note(path: str, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not (args and kwargs):
            found.setdefault(path, kwargs or args)

    for path in paths:
        copied.get_submodule(path).register_forward_pre_hook(partial(note, path), with_kwargs=True)
    try:
        call(copied, inputs)
    except Exception:  # the model is called, and its errors told, where its example is checked
        return {}
    return found
