"""The reference model of kernels that measure each image of a batch, or each row, by itself at a call.

XNNPACK's do, whatever is asked: a model that measures the whole tensor is off by a part of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from backquant.convert import convert_to_reference

#: Dimensions of what is measured, by the kernels that do it.
_MEASURED = {"Conv2d (int8)": 3, "FullyConnected (int8)": 1}


@dataclass(frozen=True)
class EachPart:
    """``reference`` of one tensor, called for each part of it of so many ``dimensions``.

    >>> made = EachPart(lambda x: x / x.amax(), 1)
    >>> made.forward(torch.tensor([[1.0, 2.0], [2.0, 8.0]]))
    tensor([[0.5000, 1.0000],
            [0.2500, 1.0000]])
    """

    reference: object
    dimensions: int

    def forward(self, x: Tensor) -> Tensor:
        """The results of the parts, one behind the other in the shape of the batch."""
        assert callable(self.reference)
        parts = x.reshape(-1, 1, *x.shape[-self.dimensions :])
        made = torch.cat([self.reference(part) for part in parts])
        return made.reshape(*x.shape[: -self.dimensions], *made.shape[1:])


def references_of_parts(kernels: Sequence[str], prepared: fx.GraphModule) -> Iterator[EachPart]:
    """The reference model of ``prepared``, of one input, for kernels that measure parts of it."""
    alone = len(prepared.graph.find_nodes(op="placeholder")) == 1
    if not alone or not any("Convert (qdint8)" in kernel for kernel in kernels):
        return
    for words, dimensions in _MEASURED.items():
        if any(words in kernel for kernel in kernels):
            yield EachPart(convert_to_reference(prepared), dimensions)
