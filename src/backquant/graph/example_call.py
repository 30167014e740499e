"""What a model does with its example inputs: one call, watched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from backquant.errors import InputError
from backquant.graph.costs import MultiplyAdds
from backquant.graph.draws import Draws
from backquant.graph.example import check_inputs
from backquant.graph.settle import WritesParameterError

__all__ = ["ExampleCall"]


class ExampleCall(NamedTuple):
    """A call of a model: the inputs, what it gave, the operators that drew random numbers (as
    ``Draws.found``), and its multiply-adds, 0 where nothing counts them."""

    inputs: Any
    output: Any
    drawn: Mapping[str, str]
    multiply_adds: int

    @classmethod
    def of(cls, model: nn.Module, inputs: Any) -> ExampleCall:
        """Call ``model`` on example inputs. Changes nothing, and raises as ``check_inputs``.

        >>> import torch
        >>> ExampleCall.of(nn.Linear(3, 2), torch.zeros(1, 3)).multiply_adds
        6
        """
        counter, draws = MultiplyAdds(), Draws()
        try:
            output = check_inputs(model, inputs, counter, draws)
        except WritesParameterError:
            raise
        except InputError:  # counting takes operators apart, which may be what failed
            draws = Draws()
            return cls(inputs, check_inputs(model, inputs, draws), draws.found, 0)
        return cls(inputs, output, draws.found, counter.count)
