"""Linear layers that are quantized at each call, and those with a float16 weight.

What the kernels do beyond the reference model, as in every model that torch's own lowering makes:

1. fbgemm, x86 and onednn quantize the input of a module to 7 bits (``reduce_range``) and fbgemm and
   x86 that of a function, whatever range was asked for; qnnpack always to 8.
2. With a float16 weight the input stays float32: the cast of a dynamic float16 input is left out.
   One that was cast statically arrives as it is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from backquant.dtypes import block_of, dtype_name
from backquant.engines.tables.arguments import POST_OPS, RELUS, bind, post_op_of, refuse_float_input
from backquant.engines.tables.quantized_weighted import TorchKernels
from backquant.engines.tables.weights import (
    check_weight,
    functional_linear,
    functional_weight,
    module_weight,
)
from backquant.graph.grouped import grouped_linear
from backquant.lower.kernels.grouped import GroupedConfig, GroupedLinear
from backquant.lower.kernels.linear_dynamic import DynamicLinear, DynamicLinearConfig
from backquant.lower.kernels.lowbit import GroupedTable, LowbitLinear, LowbitLinearConfig
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.kernels.postop import NONE, PostOp
from backquant.lower.qdq import DynamicInput, dynamic_input
from backquant.lower.rule import Emit, LowerRule, Site, operand
from backquant.match.plan import Reason
from backquant.nn.quantized.reference import Embedding, Linear
from backquant.reason_codes import ReasonCode

# The least scale of the kernels is 2**-14 (quant_utils::ChooseQuantizationParams).
_SMALLEST_SCALE = 2**-14
_RANGES = {(0, 255): False, (0, 127): True}


def dynamic_linear_rules(kernels: TorchKernels) -> list[LowerRule]:
    """Rules for modules and functions, alone and with an activation behind.

    >>> [rule.name for rule in dynamic_linear_rules(TorchKernels("fbgemm"))][:2]
    ['dynamic linear + activation', 'dynamic linear']
    """
    module, function = partial(_module, kernels), partial(_function, kernels)
    return [
        LowerRule("dynamic linear + activation", ((Linear,), POST_OPS), module),
        LowerRule("dynamic linear", ((Linear,),), module),
        LowerRule("dynamic functional linear + activation", ((F.linear,), POST_OPS), function),
        LowerRule("dynamic functional linear", ((F.linear,),), function),
    ]


def _module(kernels: TorchKernels, site: Site) -> Emit | Reason | None:
    module: Any = site.module
    if len(site.node.args) != 1 or site.node.kwargs:
        return None
    weight = module_weight(module)
    reduced = kernels.reduces_modules
    return _linear(kernels, site, site.node.args[0], weight, module.weight_axis, reduced)


def _function(kernels: TorchKernels, site: Site) -> Emit | Reason | None:
    found = functional_linear(site)
    return None if found is None else _linear(kernels, site, *found, 0, kernels.reduces_functions)


def _linear(
    kernels: TorchKernels,
    site: Site,
    argument: Any,
    weight: WeightTensors,
    axis: int,
    reduced: bool,
) -> Emit | Reason | None:
    x = dynamic_input(argument)
    if x is None and not weight.weight.is_floating_point():
        return None
    post_op = _post_op(site)
    if post_op is None:
        return None
    refused = check_dynamic(kernels, site, x, weight, axis)
    if refused:
        return refused
    source: Node = argument if x is None else x.source
    config = DynamicLinearConfig(
        kernels.engine,
        weight.weight.dtype,
        reduces_range(x, reduced),
        post_op.name,
        post_op.numbers,
        post_op.algorithm,
    )
    tensors = {
        "weight": weight.weight,
        "weight_scale": weight.scale.reshape(-1),
        "weight_zero_point": weight.zero_point.reshape(-1),
        "bias": None if weight.bias is None else weight.bias.float(),
    }
    kernel = DynamicLinear(config, tensors)
    return Emit(kernel, (source,), kernel.name, None)


def _post_op(site: Site) -> PostOp | None:
    """The activation that the kernel applies: ReLU, or any inside of a fused module."""
    if len(site.steps) == 1:
        return NONE
    tail = site.steps[1]
    if tail.key not in RELUS and tail.node is not site.node:
        return None
    return post_op_of(tail)


def reduces_range(x: DynamicInput | None, reduced: bool) -> bool:
    """Whether the kernel leaves one bit of headroom: always if ``reduced``, else if asked for."""
    if x is None or x.dtype.is_floating_point:
        return False
    return reduced or _RANGES[x.quant_min, x.quant_max]


def check_dynamic(
    kernels: TorchKernels,
    site: Site,
    x: DynamicInput | None,
    weight: WeightTensors,
    axis: int,
) -> Reason | None:
    """Why the engine's dynamic kernels cannot take this input and weight; ``None`` if they can.

    1. An input of 8 bits, affine and unsigned, with an int8 weight; or a float16 weight and an input
       that is float16 or not quantized.
    2. The engine has the kernel.
    3. The scales of the weight lie along its rows; its zero points are 0 where they must be.
    """
    dtype = weight.weight.dtype
    if dtype == torch.float16:
        return _check_half(kernels, site, x)
    if x is None or x.dtype.is_floating_point or dtype != torch.int8:
        given = torch.float32 if x is None else x.dtype
        asked = f"weight {dtype_name(dtype)}, input {dtype_name(given)}"
        return site.refuse(ReasonCode.DTYPES, asked, "int8 with uint8, float16 with float16")
    refused = _check_range(kernels, site, x)
    if refused:
        return refused
    if f"quantized.linear_dynamic({kernels.engine})" not in site.engine.kernels:
        return site.refuse(ReasonCode.NO_KERNEL, "a dynamic linear kernel", "not in this build")
    if weight.scale.dim() > 1:
        asked = "scales of groups or blocks"
        admitted = "one scale, or one for each output channel"
        return site.refuse(ReasonCode.WEIGHT_GRANULARITY, asked, admitted)
    if weight.scale.numel() > 1 and axis != 0:
        return site.refuse(
            ReasonCode.WEIGHT_AXIS, f"scales along axis {axis}", "scales along axis 0"
        )
    if not kernels.affine_weights and bool((weight.zero_point != 0).any()):
        return site.refuse(
            ReasonCode.WEIGHT_ZERO_POINT,
            "an affine weight (zero points other than 0)",
            "a symmetric weight",
            fix="MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)",
        )
    return None


def _check_half(kernels: TorchKernels, site: Site, x: DynamicInput | None) -> Reason | None:
    if x is not None and x.dtype != torch.float16:
        asked = f"weight float16, input {dtype_name(x.dtype)}"
        return site.refuse(ReasonCode.DTYPES, asked, "int8 with uint8, float16 with float16")
    if f"quantized.linear_dynamic_fp16({kernels.engine})" not in site.engine.kernels:
        admitted = f"engine {site.engine.name} has none; fbgemm and x86 have"
        return site.refuse(ReasonCode.NO_KERNEL, "a kernel for float16 weights", admitted)
    return None


def _check_range(kernels: TorchKernels, site: Site, x: DynamicInput) -> Reason | None:
    if x.dtype != torch.uint8 or x.symmetric:
        asked = f"input {dtype_name(x.dtype)}, " + ("symmetric" if x.symmetric else "affine")
        return site.refuse(ReasonCode.INPUT_DTYPE, asked, "uint8, affine", fix=_fix())
    bounds = (x.quant_min, x.quant_max)
    if bounds not in _RANGES or (_RANGES[bounds] and not kernels.has_7_bits):
        admitted = "[0, 255] or [0, 127]" if kernels.has_7_bits else "[0, 255]"
        return site.refuse(
            ReasonCode.QUANT_RANGE, f"[{x.quant_min}, {x.quant_max}]", admitted, fix=_fix()
        )
    if x.eps > _SMALLEST_SCALE:
        asked = f"scales of at least {x.eps:g}"
        return site.refuse(ReasonCode.EPS, asked, "scales of at least 2**-14", fix=_fix())
    return None


def _fix() -> str:
    return (
        "PlaceholderObserver.with_args(dtype=torch.quint8, quant_min=0, quant_max=255, "
        "is_dynamic=True)"
    )


# Linear layers of groups of rows, statically quantized and quantized at each call.


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


# Weights of 4 bits in groups and of 8 bits by row, with activations in bfloat16; and tables of such rows.

_GROUPS = (32, 64, 128, 256)


def lowbit_rules() -> list[LowerRule]:
    """Rules for linear layers and embeddings.

    >>> [rule.name for rule in lowbit_rules()][:2]
    ['weight-only linear', 'weight-only functional linear']
    """
    return [
        LowerRule("weight-only linear", ((Linear,),), _lowbit_module),
        LowerRule("weight-only functional linear", ((F.linear,),), _lowbit_function),
        LowerRule("weight-only embedding", ((Embedding,),), _embedding),
    ]


def _lowbit_module(site: Site) -> Emit | Reason | None:
    if len(site.node.args) != 1 or site.node.kwargs:
        return None
    module: Any = site.module
    return _lowbit_linear(site, site.node.args[0], module_weight(module), module.weight_axis)


def _lowbit_function(site: Site) -> Emit | Reason | None:
    found = functional_linear(site)
    return None if found is None else _lowbit_linear(site, *found, 0)


def _lowbit_linear(
    site: Site, argument: Any, weight: WeightTensors, axis: int
) -> Emit | Reason | None:
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
    kernel = GroupedTable.of(module._buffers)
    return Emit(kernel, site.node.args, kernel.name, None, site.node.kwargs)
