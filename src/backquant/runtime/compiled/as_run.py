"""Kernels that compiled code calls as they run in the lowered model: recurrent layers and cells, tables of
integers, bags of their rows.

They are one operator of ``torch``, ``backquant::as_it_runs``, whose number says which kernel it is; code that
is compiled in a process is called in it. Who compiles keeps the modules (``CompiledProgram.kept``).
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx, library, nn

from backquant.errors import EngineError
from backquant.lower.kernels.configured import KernelModule
from backquant.lower.kernels.embedding import QuantizedEmbedding, QuantizedEmbeddingBag
from backquant.lower.kernels.lowbit import GroupedTable
from backquant.lower.kernels.recurrent import QuantizedCell, QuantizedRecurrent

#: Kernels that compiled code calls as they are, without code of its own for them.
AS_RUN = (
    *(QuantizedRecurrent, QuantizedCell),
    *(QuantizedEmbedding, QuantizedEmbeddingBag, GroupedTable),
)

_LIBRARY = library.Library("backquant", "FRAGMENT")
_LIBRARY.define("as_it_runs(Tensor?[] given, int kernel) -> Tensor[]")
_NUMBERS = itertools.count()
_KEPT: WeakValueDictionary[int, AsItRuns] = WeakValueDictionary()


class AsItRuns(nn.Module):
    """``kernel`` as one operator. Not a child of it: its weights are no constants of the code.

    >>> from backquant.lower.kernels.embedding import EmbeddingConfig, rowwise_table
    >>> table = rowwise_table(torch.tensor([[1, 2]], dtype=torch.uint8), torch.ones(1), torch.zeros(1), 8)
    >>> AsItRuns(QuantizedEmbedding(EmbeddingConfig(8, 2), table))(torch.tensor([0]))
    tensor([[1., 2.]])
    """

    def __init__(self, kernel: KernelModule) -> None:
        super().__init__()
        self._held = (kernel,)
        self.number = next(_NUMBERS)
        _KEPT[self.number] = self

    @property
    def kernel(self) -> Any:
        """The kernel."""
        return self._held[0]

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        """What the kernel gives. Raises ``EngineError`` for a ``PackedSequence``."""
        if not isinstance(x, Tensor):
            raise EngineError(
                f"{self.kernel.name} is compiled for tensors, not for {type(x).__name__}",
                where="QuantizedModel.compile",
                fix="call the model as it is: quantized(x)",
            )
        if isinstance(self.kernel, (QuantizedRecurrent, QuantizedCell)):
            return self._stepped(x, *others, **named)
        given = [x, *others, *_bag_arguments(others, named)]
        return torch.ops.backquant.as_it_runs(given, self.number)[0]

    def _stepped(self, x: Tensor, hx: Any = None) -> Any:
        states = [] if hx is None else [hx] if isinstance(hx, Tensor) else list(hx)
        made = torch.ops.backquant.as_it_runs([x, *states], self.number)
        is_layer = isinstance(self.kernel, QuantizedRecurrent)
        state = tuple(made[is_layer:])
        last = state if self.kernel.config.kind == "lstm" else state[0]
        return (made[0], last) if is_layer else last


def calls_as_they_run(graph: fx.Graph) -> dict[str, int]:
    """How often a graph calls each of these kernels, by name."""
    calls = graph.find_nodes(op="call_function", target=torch.ops.backquant.as_it_runs.default)
    return dict(Counter(_KEPT[call.args[1]].kernel.name for call in calls))


def _bag_arguments(others: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """The rest of the arguments of a bag by position, without those at the end that are not given."""
    rest = [named.get(name) for name in ("offsets", "per_sample_weights")[len(others) :]]
    while rest and rest[-1] is None:
        rest.pop()
    return rest


def _run(given: list[Tensor | None], number: int) -> list[Tensor]:
    kernel = _KEPT[number].kernel
    if not isinstance(kernel, (QuantizedRecurrent, QuantizedCell)):
        return [kernel(*given)]
    x, *states = given
    hx = None if not states else states[0] if len(states) == 1 else tuple(states)
    made = kernel(x, hx)
    return [value.contiguous() for value in torch.utils._pytree.tree_leaves(made)]


def _shapes(given: list[Tensor | None], number: int) -> list[Tensor]:
    kernel, x = _KEPT[number].kernel, given[0]
    assert x is not None
    config = kernel.config
    if isinstance(kernel, (QuantizedEmbedding, GroupedTable)):
        return [x.new_empty((*x.shape, config.columns), dtype=torch.float32)]
    if isinstance(kernel, QuantizedEmbeddingBag):
        offsets = given[1] if len(given) > 1 else None
        bags = x.shape[0] if offsets is None else offsets.shape[0] - config.include_last_offset
        return [x.new_empty((bags, config.columns), dtype=torch.float32)]
    wanted = 2 if config.kind == "lstm" else 1
    if isinstance(kernel, QuantizedCell):
        return [x.new_empty((*x.shape[:-1], config.hidden_size)) for _ in range(wanted)]
    both = config.hidden_size * (2 if config.bidirectional else 1)
    batch = () if x.dim() == 2 else (x.shape[0 if config.batch_first else 1],)
    state = (config.rows, *batch, config.hidden_size)
    return [x.new_empty((*x.shape[:-1], both)), *(x.new_empty(state) for _ in range(wanted))]


_LIBRARY.impl("as_it_runs", _run, "CPU")
library.register_fake("backquant::as_it_runs", _shapes, lib=_LIBRARY)
