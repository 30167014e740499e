"""Integer weights of a site, from a reference module or from constants of the graph, and whether an
engine can multiply them."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import GraphModule, Node

from backquant.dtypes import QParams
from backquant.engines.tables.arguments import bind
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.qdq import (
    is_block_dequantize,
    is_channel_dequantize,
    is_dequantize,
    narrow_constant,
    widened_constant,
)
from backquant.lower.rule import Site
from backquant.match.plan import Reason
from backquant.nn.quantized.reference import ReferenceModule
from backquant.reason_codes import ReasonCode

_SHARED = "one scale, or one for each output channel"


def module_weight(module: ReferenceModule) -> WeightTensors:
    """The weight of a reference module, sharing its tensors.

    >>> from backquant.nn.quantized.reference import Linear
    >>> module_weight(Linear(2, 3)).weight.shape
    torch.Size([3, 2])
    """
    bias = module.bias if isinstance(module.bias, torch.Tensor) else None
    return WeightTensors(module.weight, module.weight_scale, module.weight_zero_point, bias)


def functional_linear(site: Site) -> tuple[object, WeightTensors] | None:
    """The input and the weights of a call of ``F.linear``; ``None`` where the weights are no constants."""
    found = bind(site.node, ("input", "weight", "bias"), {"bias": None})
    weight = found and functional_weight(site.graph_module, found["weight"], found["bias"])
    return (found["input"], weight) if found and weight else None


def functional_weight(
    graph_module: GraphModule, weight: object, bias: object, axis: int = 0
) -> WeightTensors | None:
    """The weight and bias of a functional operator; ``None`` unless both are constants of the graph.

    The weight is a dequantize node (per tensor, or per channel along ``axis``) of an integer buffer, or
    a narrower float that is widened.
    """
    if not isinstance(weight, Node):
        return None
    found_bias = _bias(graph_module, bias)
    if bias is not None and found_bias is None:
        return None
    narrow = constant(graph_module, narrow_constant(weight))
    if narrow is not None:
        one, zero = torch.ones(1), torch.zeros(1, dtype=torch.int64)
        return WeightTensors(narrow, one, zero, found_bias)
    integers = constant(graph_module, weight.args[0] if weight.args else None)
    if integers is None:
        return None
    if is_channel_dequantize(weight):
        scale, zero_point = (constant(graph_module, a) for a in weight.args[1:3])
        if scale is None or zero_point is None or weight.args[3] != axis:
            return None
        return WeightTensors(integers, scale, zero_point, found_bias)
    if is_block_dequantize(weight):
        scale, zero_point = (constant(graph_module, a) for a in weight.args[1:3])
        if scale is None or zero_point is None:
            return None
        return WeightTensors(integers, scale, zero_point, found_bias)
    if is_dequantize(weight):
        return WeightTensors(
            integers,
            torch.tensor([weight.args[1]], dtype=torch.float32),
            torch.tensor([weight.args[2]], dtype=torch.int64),
            found_bias,
        )
    return None


def _bias(graph_module: GraphModule, node: object) -> torch.Tensor | None:
    """A constant bias, which may be cast to a narrower float and back."""
    stored, dtype = widened_constant(node)
    found = constant(graph_module, stored)
    return found if found is None or dtype is None else found.to(dtype).float()


def constant(graph_module: GraphModule, node: object) -> torch.Tensor | None:
    """The tensor that ``node`` reads from the module; ``None`` if it is no such node.

    >>> module = nn.Module()
    >>> module.register_buffer("w", torch.ones(1))
    >>> graph = torch.fx.Graph()
    >>> node = graph.create_node("get_attr", "w")
    >>> constant(GraphModule(module, graph), node)
    tensor([1.])
    """
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value: object = graph_module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value.detach() if isinstance(value, (torch.Tensor, nn.Parameter)) else None


def check_weight(
    site: Site, tensors: WeightTensors, x: QParams, axis: int, groups: int = 1
) -> Reason | None:
    """Why the engine cannot multiply this weight with this input; ``None`` if it can.

    1. Dtypes are the engine's.
    2. Zero points of the weight are 0 and its scales lie along ``axis`` 0.
    3. A product of one step by one step is within what the kernels' integers and floats hold.
    4. Without wide accumulation two products fit into 16 bits.
    """
    engine = site.engine
    if x.dtype not in engine.activation_dtypes:
        return site.refuse(
            ReasonCode.ACTIVATION_DTYPE, str(x.dtype), _names(engine.activation_dtypes)
        )
    if tensors.weight.dtype not in engine.weight_dtypes:
        return site.refuse(
            ReasonCode.WEIGHT_DTYPE, str(tensors.weight.dtype), _names(engine.weight_dtypes)
        )
    if tensors.scale.dim() > 1:
        asked = "scales of groups or blocks"
        return site.refuse(ReasonCode.WEIGHT_GRANULARITY, asked, _SHARED)
    if tensors.scale.numel() > 1 and axis != 0:
        return site.refuse(
            ReasonCode.WEIGHT_AXIS, f"scales along axis {axis}", "scales along axis 0"
        )
    if bool((tensors.zero_point != 0).any()):
        return site.refuse(
            ReasonCode.WEIGHT_ZERO_POINT,
            "an affine weight (zero points other than 0)",
            "a symmetric weight",
            fix="PerChannelMinMaxObserver.with_args(dtype=torch.qint8, "
            "qscheme=torch.per_channel_symmetric)",
        )
    if _is_beyond(site, tensors, x):
        return site.refuse(
            ReasonCode.KERNEL_DEFECT,
            "a product of one step by one step beyond 2**16 steps of the result, or scales beyond 1e30",
            "scales of one magnitude: further out the kernel's numbers overflow",
        )
    depthwise = groups > 1 and tensors.weight.shape[1] == 1
    return _check_saturation(site, tensors, x, site.engine.max_product(depthwise))


def largest_factors(tensors: WeightTensors, x: QParams) -> tuple[int, int]:
    """The largest magnitudes that activations and weights have."""
    low, high = tensors.weight.aminmax() if tensors.weight.numel() else (0, 0)
    return max(abs(x.quant_min), abs(x.quant_max)), max(abs(int(low)), abs(int(high)))


_FAR = 2.0**16  # times 255 steps by 128: the end of 32 bits
# Reciprocals of more are lost in oneDNN, which then gives other values at each call.
_LARGEST = 1e30


def _is_beyond(site: Site, tensors: WeightTensors, x: QParams) -> bool:
    if not tensors.scale.numel():
        return False
    product = float(tensors.scale.detach().max()) * x.scale
    if site.out is None:
        return max(product, x.scale) >= _LARGEST
    return product >= _FAR * site.out.scale or max(product, x.scale, site.out.scale) >= _LARGEST


def _check_saturation(
    site: Site, tensors: WeightTensors, x: QParams, limit: int | None
) -> Reason | None:
    reach, largest = largest_factors(tensors, x)
    if limit is None or reach * largest <= limit:
        return None
    return site.refuse(
        ReasonCode.SATURATION,
        f"activations to {reach} times weights to {largest}, summed in pairs in 16 bits",
        f"products to {limit} ({_why_narrow(site)})",
        fix="quantize activations to 7 bits: HistogramObserver.with_args(reduce_range=True)",
    )


def _why_narrow(site: Site) -> str:
    if site.engine.wide_accumulation:
        return f"{site.engine.name}'s depthwise kernel"
    return f"{site.engine.isa} has no VNNI"


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)
