"""The reference models of kernels that add before they round: a convolution with an addition in one kernel.

The description has two operators with a tensor of 8 bits between them, which such a kernel never makes: what
would saturate there does not (kernels that do this are named ``rounds once``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import fx

from backquant.lower.qdq import is_dequantize, is_quantize
from backquant.operators import spellings


def rounded_once(reference: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """``reference`` once for each addend of an addition that nothing else reads, which stays float in it.

    >>> import torch
    >>> graph = fx.Graph()
    >>> _ = graph.output(graph.placeholder("x"))
    >>> [made.graph for made in rounded_once(fx.GraphModule(torch.nn.Module(), graph))]
    []
    """
    for number, node in enumerate(reference.graph.nodes):
        if node.target not in spellings("add"):
            continue
        for place, read in enumerate(node.all_input_nodes):
            if not _is_alone(read):
                continue
            made = copy.deepcopy(reference)
            same = list(made.graph.nodes)[number]
            addend: Any = same.all_input_nodes[place]
            same.replace_input_with(addend, addend.args[0].args[0])
            made.recompile()
            yield made


def _is_alone(node: fx.Node) -> bool:
    """Whether ``node`` dequantizes integers that only it reads, and one operator reads its floats."""
    if not is_dequantize(node) or len(node.users) != 1:
        return False
    integers: Any = node.args[0]
    return is_quantize(integers) and len(integers.users) == 1
