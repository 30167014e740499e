"""The outputs of the float model on batches that are held, and what other models lose beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from backquant.accuracy.figures import ErrorSums, add_errors, float_tensors, loss_of, merge_errors
from backquant.calibrate.group import ALONE, Ranks, divided
from backquant.graph import as_arguments


class FloatOutputs:
    """What ``floating`` gives for each of ``batches``, computed when it is first compared with.

    All ``ranks`` hold the same batches, and share the work of a comparison.
    """

    def __init__(self, floating: nn.Module, batches: Sequence[Any], ranks: Ranks = ALONE) -> None:
        self._floating, self._batches, self._ranks = floating, batches, ranks
        self._wanted: dict[int, list[torch.Tensor]] = {}

    def loss(self, module: nn.Module, doing: str) -> float:
        """The relative error power of the outputs of ``module``; ``doing``: what ranks wait for.

        >>> model = nn.Linear(2, 2)
        >>> FloatOutputs(model, [torch.ones(1, 2)]).loss(model, "comparing")
        0.0
        """

        def errors(place: int) -> list[ErrorSums]:
            found: list[ErrorSums] = []
            with torch.no_grad():
                made = _outputs(module, self._batches[place])
                add_errors(found, self._of_batch(place), made)
            return found

        sums: list[ErrorSums] = []
        for of_batch in divided(self._ranks, doing, range(len(self._batches)), errors):
            merge_errors(sums, of_batch)
        return loss_of(sums)

    def _of_batch(self, place: int) -> list[torch.Tensor]:
        if place not in self._wanted:
            self._wanted[place] = _outputs(self._floating, self._batches[place])
        return self._wanted[place]


def _outputs(module: nn.Module, batch: Any) -> list[torch.Tensor]:
    args, kwargs = as_arguments(batch)
    # The call of the base class: that of a GraphModule prints its own traceback.
    return float_tensors(nn.Module.__call__(module, *args, **kwargs))
