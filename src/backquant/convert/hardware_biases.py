"""Biases as the hardware adds them: integers of the scale that the description says, dequantized.

A bias with ``bias_scale: input_times_weight`` is rounded to integers of that scale, and is what the
reference model adds. A module that is called with several input scales keeps its bias.
"""

from __future__ import annotations

import torch
from torch import nn

from backquant.convert.state import Conversion
from backquant.dtypes import integer_range
from backquant.graph import get_module
from backquant.prepare import Role

__all__ = ["round_biases"]


def round_biases(work: Conversion) -> None:
    """Give the reference modules the biases that the hardware adds; rule 2."""
    scales: dict[str, set[float]] = {}
    dtypes: dict[str, torch.dtype] = {}
    inputs = _input_scales(work)
    for match in work.plan.matches:
        decision = work.plan.decisions[match.anchor]
        node = work.nodes[match.root]
        if not decision.quantized or decision.dtype_config is None or node.op != "call_module":
            continue
        config = work.prepared.backend_config.configs[match.entry]
        dtype_config = config.dtype_configs[decision.dtype_config]
        if dtype_config.bias_scale is not None and dtype_config.bias_dtype is not None:
            path = str(node.target)
            scales.setdefault(path, set()).update(inputs.get(match.root, ()))
            dtypes[path] = dtype_config.bias_dtype
    for path, found in scales.items():
        if len(found) == 1:
            _round(work, path, found.pop(), dtypes[path])


def _input_scales(work: Conversion) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for site in work.prepared.sites.sites:
        scale = work.qparams[site.group].scale
        if site.role in (Role.WEIGHT, Role.BIAS) or scale is None or scale.numel() != 1:
            continue
        for reader in site.readers:
            found.setdefault(reader, []).append(float(scale))
    return found


def _round(work: Conversion, path: str, input_scale: float, dtype: torch.dtype) -> None:
    module = get_module(work.module, path)
    part = module[0] if isinstance(module, nn.Sequential) and len(module) else module
    bias, weight_scale = getattr(part, "bias", None), getattr(part, "weight_scale", None)
    limits = integer_range(dtype)
    if bias is None or weight_scale is None or limits is None:
        return
    scale = input_scale * weight_scale.detach().double()
    steps = torch.round(bias.detach().double() / scale).clamp(*map(float, limits))
    own = part._parameters
    part._parameters = {
        **own,
        "bias": nn.Parameter((steps * scale).to(bias.dtype), requires_grad=bias.requires_grad),
    }
