"""Biases as the hardware adds them: rounded to integers at the scale of the description, and dequantized.

1. ``bias_scale: input_times_weight``: one scale for each that the weight has; ``output``: that of the output.
2. The rounded bias is what the reference model adds. A module that is called with several such scales gets
   a copy for each, which shares its weight.
3. 64-bit biases have the 40 bits that accelerators accumulate in (Arm's Ethos-U, TensorFlow Lite's 16x8).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from backquant.convert.fold import Constants
from backquant.convert.hardware_scales import chosen_config
from backquant.convert.state import Conversion
from backquant.dtypes import integer_range
from backquant.graph import get_module, set_module, shallow_copy
from backquant.match.plan import Match
from backquant.prepare import Role

_BITS_40 = (-(1 << 39), (1 << 39) - 1)


@dataclass(frozen=True)
class Scales:
    """The input and output scale of an operator, where the tensor has a single one; ``weight``: the scale
    of a function's weight."""

    inputs: tuple[float, ...] = ()
    weight: torch.Tensor | None = None
    output: float | None = None


def scales_by_node(work: Conversion) -> dict[str, Scales]:
    """The scales of each operator with a weight, by the names of its root, which reads, and its anchor,
    which returns.
    """
    inputs: dict[str, list[float]] = {}
    weights: dict[str, torch.Tensor] = {}
    outputs: dict[str, float] = {}
    for site in work.prepared.sites.sites:
        scale = work.qparams[site.group].scale
        if scale is None or site.role is Role.BIAS:
            continue
        if site.role is Role.WEIGHT:
            weights.update(dict.fromkeys(site.readers, scale))
        elif scale.numel() == 1:
            outputs[site.producer] = float(scale)
            for reader in site.readers:
                inputs.setdefault(reader, []).append(float(scale))
    names = {*inputs, *weights, *outputs}
    return {
        name: Scales(tuple(inputs.get(name, ())), weights.get(name), outputs.get(name))
        for name in names
    }


def accumulator_steps(
    work: Conversion, match: Match, scales: dict[str, Scales]
) -> torch.Tensor | None:
    """What one step of the sums of a weighted operator stands for: input × weight, float64; one, or one for
    each channel that comes out."""
    found = scales.get(match.root, Scales())
    root = work.nodes[match.root]
    weight, groups = found.weight, 1
    if root.op == "call_module":
        module = _part(work, root)
        weight = getattr(module, "weight_scale", None)
        groups = int(module.groups) if getattr(module, "transposed", False) else 1  # type: ignore[arg-type]
    elif "conv_transpose" in str(root.target):
        groups = int(_argument(root, 6, "groups", 1))
    if weight is None or len(set(found.inputs)) != 1:
        return None
    steps = found.inputs[0] * weight.detach().double()
    shared = groups > 1 and steps.numel() > 1  # transposed: each group has the scales of the first
    return steps.repeat(groups) if shared else steps


def _argument(node: fx.Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, default)


def round_biases(work: Conversion) -> None:
    """Give modules and functions the biases that the hardware adds."""
    scales = scales_by_node(work)
    of_modules: dict[str, list[tuple[fx.Node, torch.Tensor, torch.dtype]]] = {}
    for match in work.plan.matches:
        config = chosen_config(work, match)
        if config is None or config.bias_scale is None or config.bias_dtype is None:
            continue
        if config.bias_scale == "output":
            own = scales.get(match.anchor, Scales()).output
            steps = None if own is None else torch.tensor(own, dtype=torch.float64)
        else:
            steps = accumulator_steps(work, match, scales)
        root = work.nodes[match.root]
        if steps is None:
            continue
        if root.op == "call_module":
            called = of_modules.setdefault(str(root.target), [])
            called.append((root, steps, config.bias_dtype))
        else:
            _round_argument(work, root, steps, config.bias_dtype)
    for path, calls in of_modules.items():
        _round_calls(work, path, calls)


def _round_calls(
    work: Conversion, path: str, calls: list[tuple[fx.Node, torch.Tensor, torch.dtype]]
) -> None:
    """Rule 2: the first scale rounds the bias of the module itself, each other one that of a copy."""
    made: list[tuple[torch.Tensor, str]] = []
    module = get_module(work.module, path)
    if getattr(_part(work, path), "bias", None) is None:
        return
    for node, steps, _ in calls:
        known = next((name for other, name in made if torch.equal(other, steps)), "")
        if not known:
            known = work.editor.names.take(f"{path}_bias_") if made else path
            if made:
                set_module(work.module, known, shallow_copy(module))
            made.append((steps, known))
        node.target = known
    for steps, name in reversed(made):  # the module itself last: its copies begin with its bias
        _round_parameter(_part(work, name), steps, calls[0][2])


def _part(work: Conversion, where: fx.Node | str) -> nn.Module:
    module = get_module(work.module, where if isinstance(where, str) else str(where.target))
    return module[0] if isinstance(module, nn.Sequential) and len(module) else module


def _round_parameter(module: nn.Module, steps: torch.Tensor, dtype: torch.dtype) -> None:
    bias = getattr(module, "bias", None)
    if bias is None:
        return
    made = nn.Parameter(
        _rounded(bias, steps.to(bias.device), dtype), requires_grad=bias.requires_grad
    )
    module._parameters = {**module._parameters, "bias": made}


def _round_argument(
    work: Conversion, root: fx.Node, steps: torch.Tensor, dtype: torch.dtype
) -> None:
    """A constant bias of a function is replaced by a rounded one, which is a buffer."""
    for node in biases_of(work, root):
        if node.op != "get_attr":
            continue
        bias = Constants(work.module).tensor(node)
        if bias is None:
            continue
        prefix = f"{str(node.target).replace('.', '_')}_rounded_"
        tensor = _rounded(bias, steps.to(bias.device), dtype)
        root.replace_input_with(
            node, work.editor.read_buffer(root, work.editor.names.take(prefix), tensor)
        )


def biases_of(work: Conversion, root: fx.Node) -> Iterator[fx.Node]:
    """The node that a function's bias comes from, if it has one."""
    entries = work.prepared.backend_config.shared_configs
    named = (
        entry._input_type_to_index.get("bias")
        for entry in entries
        if entry.normal_pattern.size == 1 and entry.normal_pattern.anchor.op == root.target
    )
    place = next((index for index in named if index is not None), len(root.args))
    bias = root.args[place] if place < len(root.args) else root.kwargs.get("bias")
    if isinstance(bias, fx.Node):
        yield bias


def _rounded(bias: torch.Tensor, steps: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limits = _BITS_40 if dtype == torch.int64 else integer_range(dtype)
    assert limits is not None
    integers = torch.round(bias.detach().double() / steps).clamp(*map(float, limits))
    return (integers * steps).to(bias.dtype)
