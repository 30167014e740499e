"""Whether a captured graph gives what the model gives, on the example inputs.

A capture follows one way through ``forward``, and writes tensors that are changed in place as values. Where
it loses something (a change under another name, a branch on a stand-in) the graph computes other numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from backquant.graph import check_inputs

_NOISE = 1e-2  # of the power of an output: 20 dB; what folding rounds is far below
_SMALL = 1e-6  # of the power of all outputs: an output below it says nothing
_NUDGE = 1e-6  # of the inputs


def differs(model: nn.Module, example_inputs: Any, found: Any) -> bool:
    """Whether ``found``, what a graph of ``model`` gives for the example inputs, is not what ``model`` gives.

    Other numbers of outputs are not compared, nor those of a model that amplifies a rounding of its
    inputs as far (it selects by their order, say).

    >>> x = torch.tensor([1.0, 2.0])
    >>> differs(nn.ReLU(), x, torch.tensor([1.0, 2.0])), differs(nn.ReLU(), x, torch.tensor([1.0, 0.0]))
    (False, True)
    """
    wanted = check_inputs(model, example_inputs)
    if not _far(wanted, found):
        return False
    nudged = tree_map_only(torch.Tensor, _nudged, example_inputs)
    return not _far(wanted, check_inputs(model, nudged))


def _nudged(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + _NUDGE) if x.is_floating_point() else x


def _far(wanted: Any, found: Any) -> bool:
    if len(_floats(wanted)) != len(_floats(found)):
        return False
    pairs = list(zip(_floats(wanted), _floats(found), strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return True
    powers = [(_power(a), _power(a.double() - b.double())) for a, b in pairs]
    least = _SMALL * sum(signal for signal, _ in powers)
    return any(noise > _NOISE * max(signal, least) for signal, noise in powers)


def _floats(values: Any) -> list[torch.Tensor]:
    return [
        value
        for value in tree_leaves(values)
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.device.type == "cpu"
    ]


def _power(x: torch.Tensor) -> float:
    """The power of the finite values."""
    x = x.detach().double()
    return float(x[x.isfinite()].square().sum())
