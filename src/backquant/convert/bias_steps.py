"""The step of integer biases, counted in steps of the output: input scale × weight scale / output scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from backquant.convert.constants import Constants
from backquant.convert.hardware_biases import biases_of
from backquant.convert.state import Conversion
from backquant.convert.weights import without_training
from backquant.graph import get_module
from backquant.match.plan import Match


def bias_steps(
    work: Conversion, match: Match, scales: Mapping[tuple[str, str], Sequence[float]]
) -> list[float]:
    """Input scale × weight scale / output scale, for each channel whose bias is not 0.

    Empty without a bias, where a scale is not known, and where an activation has several scales. If the
    bias is computed in the graph, all channels count.
    """
    inputs, outputs = (set(scales.get((match.anchor, role), ())) for role in ("input", "output"))
    weights = list(scales.get((match.anchor, "weight"), ()))
    if len(inputs) != 1 or len(outputs) != 1 or not weights:
        return []
    given, output = inputs.pop(), outputs.pop()
    steps = torch.tensor(weights, dtype=torch.float64) * given / output
    root = work.nodes[match.root]
    if root.op == "call_module":
        bias = _of_module(get_module(work.module, str(root.target)))
        return [] if bias is None else _beside(bias, steps)
    found: list[float] = []
    for node in biases_of(work, root):
        bias = Constants(work.module).tensor(node) if node.op == "get_attr" else None
        found += steps.tolist() if bias is None else _beside(bias, steps)
    return found


def _of_module(trained: nn.Module) -> torch.Tensor | None:
    plain = without_training(trained)
    part = plain[0] if isinstance(plain, nn.Sequential) and len(plain) else plain
    bias = getattr(part, "bias", None)
    return bias if isinstance(bias, torch.Tensor) else None


def _beside(bias: torch.Tensor, steps: torch.Tensor) -> list[float]:
    """The steps of channels whose bias is not 0. In a transposed convolution each group has the same
    steps."""
    if steps.numel() == 1 or bias.numel() % steps.numel():
        return steps.tolist() if bool((bias.detach() != 0).any()) else []
    each = steps.repeat(bias.numel() // steps.numel())
    found: list[float] = each[bias.detach().flatten().cpu() != 0].tolist()
    return found
