"""What the nodes of a trace are on the example inputs: tensors without their values."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from backquant.graph.grouped import product_shape

# Of a tensor: what depends on how it was made, not on its size and dtype.
_OF_GRADIENTS = frozenset({"requires_grad", "grad", "grad_fn", "is_leaf", "retains_grad"})


class Unknown:
    """What cannot be told: a number that depends on the values of tensors, or the result of code that fails
    on tensors without values."""


UNKNOWN = Unknown()


class ExampleValues:
    """Values by node.

    A tensor is one without values (``FakeTensorMode``), so that nothing is computed and nobody can decide by
    its numbers.

    >>> values = ExampleValues()
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> values.give(x, torch.ones(2, 3))
    >>> values.run(graph.call_method("flatten", (x,)), "flatten").shape
    torch.Size([6])
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> Any:
        """The value of ``node``, or ``UNKNOWN``."""
        return self._known.get(node, UNKNOWN)

    def give(self, node: fx.Node, value: Any) -> None:
        """``value``, of the example inputs or of the model, is that of ``node``."""
        try:
            self._known[node] = pytree.tree_map_only(torch.Tensor, self._stand_in, value)
        except Exception:  # tensors of other layouts, and what no stand-in is known for
            self._known[node] = UNKNOWN

    def run(self, node: fx.Node, call: Callable[..., Any] | str) -> Any:
        """The value of ``node``, a call of the function or the method ``call``, which is noted.

        Raises what a call raises that has no tensor among its arguments.
        """
        known = all(self.of(each) is not UNKNOWN for each in node.all_input_nodes)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.of)
        self._known[node] = UNKNOWN
        if known:
            self._known[node] = self.called(call, args, kwargs)
        return self._known[node]

    def called(
        self, call: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What ``call`` gives for arguments that are values."""
        if call is getattr and isinstance(args[0], torch.Tensor) and args[1] in _OF_GRADIENTS:
            return UNKNOWN
        try:
            with self._mode, torch.no_grad():
                if isinstance(call, str):
                    return getattr(args[0], call)(*args[1:], **kwargs)
                made = product_shape(call, args, kwargs)
                return call(*args, **kwargs) if made is None else made
        except Exception:
            leaves = (call, *pytree.tree_leaves((args, kwargs)))
            if any(isinstance(leaf, (torch.Tensor, nn.Module, MethodType)) for leaf in leaves):
                return UNKNOWN
            raise

    def try_on_tensors(self, node: fx.Node, call: Callable[..., Any]) -> None:
        """The value of ``node``, a call of a module that asks for the values of tensors: what it gives for
        zeros and for ones, if these are of the same form."""
        if any(self.of(each) is UNKNOWN for each in node.all_input_nodes):
            return
        given = fx.node.map_arg((node.args, node.kwargs), self.of)
        made = []
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for filled in (torch.zeros, torch.ones):
                args, kwargs = pytree.tree_map_only(torch.Tensor, _filled_with(filled), given)
                try:
                    made.append(call(*args, **kwargs))
                except Exception:  # code of the user
                    return
        forms = [pytree.tree_map_only(torch.Tensor, _form, each) for each in made]
        if forms[0] == forms[1]:
            self.give(node, made[0])

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._mode.from_tensor(tensor, static_shapes=True)


def _filled_with(fill: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: fill(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
