"""Means of integers with free sizes: in float, and rounded where they are quantized.

XNNPACK's mean of integers (ExecuTorch 1.5) keeps the room for its sums that an earlier, smaller call needed:
some batches larger than the one before give wrong numbers. A clamp that changes nothing, between the mean and
what it dequantizes, keeps the delegate from computing on integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from backquant.deploy.edits import AtenCalls
from backquant.lower.qdq import is_dequantize
from backquant.operators import named, overload

REASON = "XNNPACK's mean of integers is wrong in a larger batch than the one before, where sizes are free"
_MEANS = frozenset(named("mean").aten)
_POOLS = frozenset(overload(f"adaptive_avg_pool{dims}d") for dims in (1, 2))


def means_of_free_sizes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that this is about, pools to one value among them."""
    for node in graph.nodes:
        is_mean = node.target in _MEANS or (node.target in _POOLS and {*node.args[1]} == {1})
        if is_mean and is_dequantize(node.args[0]) and _is_free(node.args[0]):
            yield node


def _is_free(node: Any) -> bool:
    return not all(isinstance(size, int) for size in node.meta["val"].shape)


def compute_in_float(node: Any) -> None:
    """Put the clamp before one of them."""
    source, widest = node.args[0], torch.finfo(torch.float32)
    node.replace_input_with(source, AtenCalls(node).clamp(source, widest.min, widest.max))
