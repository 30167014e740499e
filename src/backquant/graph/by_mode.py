"""Parts of a model that compute something else in training than in evaluation, as both graphs.

Dropped paths (stochastic depth) are such a part: ``if not self.training: return x``. They have no parameters,
so that nothing in them is quantized.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import fx, nn
from torch.nn.modules.lazy import LazyModuleMixin

_NUMBERS = (bool, int, float, str, type(None))


class ModeValue(nn.Module):
    """A constant (``True``, ``0.1``) that differs between training and evaluation.

    >>> p = ModeValue(0.1, 0.0)
    >>> p(), p.eval()()
    (0.1, 0.0)
    """

    def __init__(self, in_training: Any, in_evaluation: Any) -> None:
        super().__init__()
        self.in_training = in_training
        self.in_evaluation = in_evaluation

    def forward(self) -> Any:
        """The value for the present mode."""
        return self.in_training if self.training else self.in_evaluation

    def extra_repr(self) -> str:
        return f"{self.in_training!r} in training, {self.in_evaluation!r} in evaluation"


class ByMode(nn.Module):
    """Two graphs of ``part``; ``train()`` and ``eval()`` choose. Its numbers and texts can be read.

    >>> import torch
    >>> twice = fx.symbolic_trace(nn.Sequential(nn.Identity()))
    >>> half = fx.symbolic_trace(lambda x: x / 2)
    >>> part = ByMode(nn.Identity(), twice, half)
    >>> part(torch.ones(1)), part.eval()(torch.ones(1))
    (tensor([1.]), tensor([0.5000]))
    """

    def __init__(
        self, part: nn.Module, in_training: fx.GraphModule, in_evaluation: fx.GraphModule
    ) -> None:
        super().__init__()
        plain = {name: each for name, each in vars(part).items() if isinstance(each, _NUMBERS)}
        self.stands_for = type(part).__name__
        self.plain = {name: each for name, each in plain.items() if not name.startswith("_")}
        self.in_training = in_training
        self.in_evaluation = in_evaluation
        self.train(part.training)

    def __getattr__(self, name: str) -> Any:
        plain = self.__dict__.get("plain", {})
        return plain[name] if name in plain else super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        part = self.in_training if self.training else self.in_evaluation
        return part(*args, **kwargs)

    def extra_repr(self) -> str:
        return self.stands_for


def may_be_by_mode(part: nn.Module) -> bool:
    """Whether ``part`` has neither parameters nor buffers, and code of its own.

    >>> may_be_by_mode(nn.Linear(2, 2)), may_be_by_mode(nn.Identity())
    (False, False)
    """
    is_torchs = type(part).__module__.startswith("torch.") or isinstance(part, LazyModuleMixin)
    return not is_torchs and next(chain(part.parameters(), part.buffers()), None) is None


def is_identity(graph: fx.Graph) -> bool:
    """Whether ``graph`` returns its first argument.

    >>> is_identity(fx.symbolic_trace(lambda x: x).graph), is_identity(fx.symbolic_trace(lambda x: -x).graph)
    (True, False)
    """
    [first, *_] = [*graph.find_nodes(op="placeholder"), None]
    return first is not None and graph.output_node().args[0] is first
