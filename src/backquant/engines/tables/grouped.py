"""Linear layers of groups of rows, statically quantized and quantized at each call."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.fx import Node

from backquant.engines.tables.arguments import bind, refuse_float_input
from backquant.engines.tables.dynamic import check_dynamic
from backquant.engines.tables.torch_kernels import TorchKernels
from backquant.engines.tables.weights import check_weight, functional_weight
from backquant.graph.grouped import grouped_linear
from backquant.lower.dynamic import dynamic_input
from backquant.lower.kernels.grouped import GroupedConfig, GroupedLinear
from backquant.lower.rule import Emit, LowerRule, Site, operand
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode


def grouped_rules(kernels: TorchKernels) -> list[LowerRule]:
    """The rule of engines with oneDNN's linear kernel.

    >>> [rule.name for rule in grouped_rules(TorchKernels("x86"))]
    ['grouped linear']
    """
    return [LowerRule("grouped linear", ((grouped_linear,),), partial(_grouped, kernels))]


def _grouped(kernels: TorchKernels, site: Site) -> Emit | Reason:
    found = bind(site.node, ("input", "weight", "offsets"), {})
    weight = found and functional_weight(site.graph_module, found["weight"], None)
    if not found or not weight:
        return site.refuse(
            ReasonCode.COMPUTED_WEIGHT,
            "a weight that is computed in the graph",
            "a constant weight, quantized along axis 0",
        )
    source, offsets = found["input"], found["offsets"]
    at_each_call = dynamic_input(source)
    if at_each_call is not None:
        refused = check_dynamic(kernels, site, at_each_call, weight, 0)
        if refused is None and weight.weight.is_floating_point():
            refused = site.refuse(
                ReasonCode.NO_KERNEL, "a kernel for float16 weights", "int8 weights"
            )
        if refused:
            return refused
        config = GroupedConfig(
            is_dynamic=True, quant_max=at_each_call.quant_max, eps=at_each_call.eps
        )
        return _emit(config, weight, at_each_call.source, offsets, None)
    x = operand(source)
    if x.qparams is None:
        return refuse_float_input(site)
    refused = check_weight(site, weight, x.qparams, 0)
    if refused:
        return refused
    out: Any = (1.0, 0) if site.out is None else (*site.out.args, site.out.dtype)
    return _emit(GroupedConfig(*x.qparams.args, *out), weight, x.node, offsets, site.out)


def _emit(config: GroupedConfig, weight: Any, x: Node, offsets: Node, out: Any) -> Emit:
    kernel = GroupedLinear(config, weight)
    return Emit(kernel, (x, offsets), kernel.name, out)
