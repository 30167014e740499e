"""Weights of 4 bits in groups and of 8 bits by row, with activations in bfloat16; and tables of such rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from backquant.dtypes import block_of, dtype_name
from backquant.engines.tables.weights import functional_linear, module_weight
from backquant.lower.dynamic import dynamic_input
from backquant.lower.kernels.lowbit import (
    GroupedTable,
    LowbitLinear,
    LowbitLinearConfig,
)
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.rule import Emit, LowerRule, Site
from backquant.match.plan import Reason
from backquant.nn.quantized.reference import Embedding, Linear
from backquant.reason_codes import ReasonCode

_GROUPS = (32, 64, 128, 256)


def lowbit_rules() -> list[LowerRule]:
    """Rules for linear layers and embeddings.

    >>> [rule.name for rule in lowbit_rules()][:2]
    ['weight-only linear', 'weight-only functional linear']
    """
    return [
        LowerRule("weight-only linear", ((Linear,),), _module),
        LowerRule("weight-only functional linear", ((F.linear,),), _function),
        LowerRule("weight-only embedding", ((Embedding,),), _embedding),
    ]


def _module(site: Site) -> Emit | Reason | None:
    if len(site.node.args) != 1 or site.node.kwargs:
        return None
    module: Any = site.module
    return _linear(site, site.node.args[0], module_weight(module), module.weight_axis)


def _function(site: Site) -> Emit | Reason | None:
    found = functional_linear(site)
    return None if found is None else _linear(site, *found, 0)


def _linear(site: Site, argument: Any, weight: WeightTensors, axis: int) -> Emit | Reason | None:
    x = dynamic_input(argument)
    if x is None or x.dtype != torch.bfloat16 or weight.weight.dtype != torch.int8:
        return None
    refused = _check(site, weight, axis)
    if refused:
        return refused
    block = block_of(weight.weight.shape, weight.scale.shape)
    group = 0 if block is None else block[1]
    tensors = {"weight": weight.weight, "weight_scale": weight.scale, "bias": weight.bias}
    kernel = LowbitLinear(LowbitLinearConfig(8 if block is None else 4, group), tensors)
    source: Node = x.source
    return Emit(kernel, (source,), kernel.name, None)


def _check(site: Site, weight: WeightTensors, axis: int) -> Reason | None:
    """Why torch's kernels cannot take this weight; ``None`` if they can."""
    if bool((weight.zero_point != 0).any()):
        asked = "an affine weight (zero points other than 0)"
        return site.refuse(ReasonCode.WEIGHT_ZERO_POINT, asked, "a symmetric weight")
    block = block_of(weight.weight.shape, weight.scale.shape)
    if block is None:
        by_row = weight.scale.dim() == 1 and axis == 0
        asked = f"scales along axis {axis}" if weight.scale.dim() else "one scale"
        if not by_row:
            return site.refuse(ReasonCode.WEIGHT_AXIS, asked, "scales along axis 0")
        return None
    if block[0] != 1 or block[1] not in _GROUPS:
        asked = f"blocks of {' × '.join(map(str, block))}"
        return site.refuse(
            ReasonCode.WEIGHT_GRANULARITY, asked, "groups of 32, 64, 128 or 256 of a row"
        )
    low, high = weight.weight.aminmax()
    if int(low) < -8 or int(high) > 7:
        return site.refuse(ReasonCode.QUANT_RANGE, f"weights [{int(low)}, {int(high)}]", "[-8, 7]")
    return None


def _embedding(site: Site) -> Emit | Reason | None:
    module: Any = site.module
    weight, scale = module.weight, module.weight_scale
    if weight.dtype != torch.int8 or not scale.dim():
        return None
    if module.max_norm is not None:
        return site.refuse(ReasonCode.MAX_NORM, f"max_norm={module.max_norm}", "max_norm=None")
    block = block_of(weight.shape, scale.shape)
    by_row = module.weight_axis == 0 if block is None else block[0] == 1
    if not by_row or bool((module.weight_zero_point != 0).any()):
        asked = f"{dtype_name(module.weight_dtype)}, scales {list(scale.shape)}"
        return site.refuse(
            ReasonCode.WEIGHT_GRANULARITY, asked, "a symmetric table, groups of a row"
        )
    grid = scale.reshape(len(weight), -1)
    kernel = GroupedTable.of(weight, grid)
    return Emit(kernel, site.node.args, kernel.name, None, site.node.kwargs)
