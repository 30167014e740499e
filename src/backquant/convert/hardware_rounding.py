"""Quantize outputs with the arithmetic of the hardware: ``rounding`` and ``requantization`` of a dtype
config.

Behind a convolution, linear layer or matrix product, the quantize node is replaced by one that computes
the integer sums and requantizes them with the named arithmetic. Behind other operators, and where the
input has no single known scale, it is replaced by one that only rounds as named. The dequantize node
stays.
"""

from __future__ import annotations

import torch
from torch import fx

from backquant.backend_config import DTypeConfig
from backquant.convert.hardware_biases import accumulator_steps, scales_by_node
from backquant.convert.hardware_scales import chosen_config
from backquant.convert.state import Conversion
from backquant.errors import ConfigError
from backquant.graph import get_module, register_requantize
from backquant.match.plan import Match
from backquant.operators import find

_DEFAULT = "half_even"


def round_results(work: Conversion) -> None:
    """Replace the quantize nodes of the results whose rounding is described.

    Raises ConfigError in the dialect of quantized tensors, whose operators round halves to even.
    """
    found = [(match, chosen_config(work, match)) for match in work.plan.matches]
    described = [(m, c) for m, c in found if c is not None and (c.rounding or c.requantization)]
    if not described:
        return
    if work.dialect != "decomposed":
        raise ConfigError(
            "rounding and requantization have no operators on quantized tensors",
            where=f"{work.prepared.backend_config.name}, convert_to_reference_fx(dialect={work.dialect!r})",
            fix='dialect="decomposed", which backquant.quantize uses',
        )
    register_requantize()
    sites = {site.producer: site.name for site in work.prepared.sites.sites if site.producer}
    scales = scales_by_node(work)
    for match, config in described:
        dequantize = work.dequantized.get(sites.get(match.anchor, ""))
        if dequantize is None:
            continue
        quantize = dequantize.args[0]
        arithmetic = config.requantization or "float"
        steps = None if arithmetic == "float" else accumulator_steps(work, match, scales)
        if isinstance(quantize, fx.Node):
            _replace(work, quantize, match, config, steps)


def _replace(
    work: Conversion,
    quantize: fx.Node,
    match: Match,
    config: DTypeConfig,
    steps: torch.Tensor | None,
) -> None:
    ops, rounding = torch.ops.backquant, config.rounding or _DEFAULT
    value, *qparams = quantize.args
    if steps is None:
        quantize.target = ops.quantize_rounded.default
        quantize.args = (value, *qparams, rounding)
        return
    root = work.nodes[match.root]
    name = work.editor.names.take(f"{match.root}_accumulator_step_")
    unit = work.editor.read_buffer(quantize, name, steps)
    quantize.target = ops.requantize.default
    axis = _channel_axis(work, root)
    quantize.args = (value, unit, axis, *qparams, config.requantization, rounding)


def _channel_axis(work: Conversion, root: fx.Node) -> int:
    """The axis of output channels, from the end: the last behind a matrix, else before those of space."""
    if root.op == "call_module":
        module = get_module(work.module, str(root.target))
        part = module[0] if isinstance(module, torch.nn.Sequential) else module
        dims = part.weight.dim()  # type: ignore[operator]
    else:
        operator = find(root.target)
        name = "" if operator is None else operator.name
        dims = int(name[-2]) + 2 if name.startswith("conv") and name.endswith("d") else 2
    return -1 if dims == 2 else 1 - int(dims)
