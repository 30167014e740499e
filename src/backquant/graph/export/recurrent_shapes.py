"""What recurrent layers give in an export: tensors of the sizes that follow from their arguments.

PyTorch finds these sizes by computing the layer step by step, for the length of the example: minutes for a
thousand steps where sizes are free, and the length is then fixed. In the program the layer is one operator
either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_aten = torch.ops.aten
_LAYERS = (_aten.lstm.input, _aten.gru.input, _aten.rnn_tanh.input, _aten.rnn_relu.input)
#: The calls that recurrent modules make: of layers, over all steps, and of cells.
RECURRENT = (
    *_LAYERS,
    *(_aten.lstm_cell.default, _aten.gru_cell.default),
    *(_aten.rnn_tanh_cell.default, _aten.rnn_relu_cell.default),
)


@contextmanager
def recurrent_by_shape() -> Iterator[None]:
    """Within the block, tensors without values pass recurrent layers in one step.

    Nothing changes for tensors that have values, nor where a torch version finds the sizes otherwise.

    >>> import warnings
    >>> with recurrent_by_shape(), warnings.catch_warnings(action="ignore"):
    ...     program = torch.export.export(torch.nn.GRU(2, 3), (torch.zeros(1000, 1, 2),))
    >>> [tuple(node.meta["val"].shape) for node in program.graph.nodes if node.name == "getitem"]
    [(1000, 1, 3)]
    """
    replaced: list[tuple[Any, dict[Any, Any]]] = []
    try:
        for layer in _LAYERS:
            kernels = getattr(layer, "py_kernels", None)
            if isinstance(kernels, dict) and hasattr(layer, "_dispatch_cache"):
                replaced.append((layer, dict(kernels)))
                kernels.update({key: _by_shape(kernel) for key, kernel in kernels.items()})
                layer._dispatch_cache.clear()
        yield
    finally:
        for layer, kernels in replaced:
            layer.py_kernels.update(kernels)
            layer._dispatch_cache.clear()


def _by_shape(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(input: Any, hx: Any, *args: Any, **kwargs: Any) -> Any:
        # the arguments of the schema, all of which torch passes by position
        if not isinstance(input, FakeTensor) or len(args) != len(_ARGUMENTS) or kwargs:
            return kernel(input, hx, *args, **kwargs)
        named = dict(zip(_ARGUMENTS, args, strict=True))
        return _results(input, hx, named["bidirectional"], named["batch_first"])

    return call


_ARGUMENTS = (
    *("params", "has_biases", "num_layers", "dropout", "train"),
    *("bidirectional", "batch_first"),
)


def _results(
    x: torch.Tensor, state: Any, bidirectional: bool, batch_first: bool
) -> tuple[torch.Tensor, ...]:
    """Output (length, batch, features) and last state, or states, of a layer.

    >>> [tuple(t.shape) for t in _results(torch.zeros(2, 7, 4), torch.zeros(2, 2, 5), True, True)]
    [(2, 7, 10), (2, 2, 5)]
    """
    states = tuple(state) if isinstance(state, (tuple, list)) else (state,)
    batch, length = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
    output = x.new_empty((length, batch, states[0].shape[-1] * (1 + bidirectional)))
    output = output.transpose(0, 1) if batch_first else output
    return (output, *(one.new_empty(one.shape) for one in states))
