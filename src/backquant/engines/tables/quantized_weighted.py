"""torch's ``quantized::`` kernels for convolutions, linear layers and transposed convolutions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from backquant.engines.tables.arguments import RELUS
from backquant.engines.tables.layer_calls import (
    Geometry,
    WeightedCall,
    conv_rules,
    conv_transpose_rules,
    linear_rules,
)
from backquant.engines.tables.weights import check_weight, largest_factors
from backquant.lower.kernels.quantized import QuantizedConfig, QuantizedWeighted
from backquant.lower.rule import Emit, LowerRule, Site
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode

# What differs between torch's quantized engines, for the tables that call their kernels.


@dataclass(frozen=True)
class TorchKernels:
    """The kernels of one of torch's quantized engines (``torch.backends.quantized.supported_engines``).

    ``engine``: the one that weights are packed for. ``transposed``: the one whose transposed convolutions are
    called. What is quantized at each call:

    1. ``reduces_modules``, ``reduces_functions``: the kernels of modules (linear and recurrent layers) and
       that of ``F.linear`` quantize inputs to 7 bits, whatever range was asked for.
    2. ``has_7_bits``: 7 bits can be asked for.
    3. ``affine_weights``: zero points of weights may differ from 0.

    >>> TorchKernels("fbgemm").transposed
    'fbgemm'
    """

    engine: str
    transposed: str = "fbgemm"
    reduces_modules: bool = True
    reduces_functions: bool = True
    has_7_bits: bool = True
    affine_weights: bool = True


def quantized_weighted_rules(kernels: TorchKernels) -> list[LowerRule]:
    """Rules for convolutions and linear layers.

    >>> len(quantized_weighted_rules(TorchKernels("fbgemm")))
    8
    """
    build = partial(_weighted, kernels.engine)
    return [*conv_rules(build), *linear_rules(build)]


def quantized_transposed_rules(kernels: TorchKernels) -> list[LowerRule]:
    """Rules for transposed convolutions.

    >>> len(quantized_transposed_rules(TorchKernels("fbgemm")))
    2
    """
    return conv_transpose_rules(partial(_transposed, kernels.transposed))


_MOST = 2.0**30  # the other half of 32 bits is for the products


def _check(site: Site, call: WeightedCall) -> Reason | None:
    assert call.x.qparams is not None
    if site.out is None:
        return site.refuse(ReasonCode.FLOAT_OUTPUT, "a float result", "a quantized result")
    if site.out.dtype != call.x.qparams.dtype:
        return site.refuse(ReasonCode.OUTPUT_DTYPE, str(site.out.dtype), str(call.x.qparams.dtype))
    return check_weight(site, call.weight, call.x.qparams, call.axis)


def _pads_before(site: Site, call: WeightedCall) -> bool:
    """Whether the input is padded before the kernel; padding of a transposed convolution cuts off results."""
    padded = call.geometry is not None and any(call.geometry.padding)
    return padded and not call.transposed and _saturates_depthwise(site, call)


def _saturates_depthwise(site: Site, call: WeightedCall) -> bool:
    """Whether the sums of the engine's depthwise kernel may leave 16 bits."""
    assert call.x.qparams is not None
    groups = call.geometry.groups if call.geometry is not None else 1
    limit = site.engine.max_product(groups > 1 and call.weight.weight.shape[1] == 1)
    reach, largest = largest_factors(call.weight, call.x.qparams)
    return limit is not None and reach * largest > limit


def _check_bias(site: Site, call: WeightedCall, engine: str) -> Reason | None:
    """qnnpack adds the bias as an integer of 32 bits, of one step by one step, which has to be finer than a
    step of the result; fbgemm as a float."""
    bias, x = call.weight.bias, call.x.qparams
    if engine != "qnnpack" or bias is None or not bias.numel():
        return None
    assert x is not None
    step = call.weight.scale.detach().double() * x.scale
    if site.out is not None and bool((step > site.out.scale).logical_and(bias.detach() != 0).any()):
        return site.refuse(
            ReasonCode.KERNEL_DEFECT,
            "a bias where one step of the input by one of the weight is beyond a step of the result",
            "a finer step: qnnpack rounds the bias to whole products",
        )
    if (bias.detach().abs().double() / step).max().item() < _MOST:
        return None
    return site.refuse(
        ReasonCode.KERNEL_DEFECT,
        "a bias beyond 32 bits of one step of the input by one of the weight",
        "a bias of the magnitude of the products: qnnpack cuts it off",
    )


def _weighted(engine: str, site: Site, call: WeightedCall) -> Emit | Reason:
    refused = _check(site, call) or _check_bias(site, call, engine)
    if refused:
        return refused
    fused = site.steps[1:]
    if fused and fused[0].key not in RELUS:
        return site.refuse(ReasonCode.POST_OP, "an activation other than ReLU", "ReLU")
    plain = "linear" if call.geometry is None else f"conv{len(call.geometry.stride)}d"
    return _emit(site, call, f"{plain}_relu" if fused else plain, engine)


def _transposed(engine: str, site: Site, call: WeightedCall) -> Emit | Reason:
    # Of torch 2.13's kernels oneDNN's are wrong when the numbers of input and output channels differ,
    # qnnpack's in three dimensions, and fbgemm's for 2d kernels of height 2 without groups: they
    # return other values at each call (so does torch's own converted model).
    geometry = call.geometry
    assert geometry is not None
    if f"quantized.conv_transpose({engine})" not in site.engine.kernels:
        return site.refuse(
            ReasonCode.NO_KERNEL, f"transposed convolution by {engine}", "not in this build"
        )
    if call.weight.scale.numel() > 1:
        return site.refuse(
            ReasonCode.WEIGHT_GRANULARITY,
            "one scale per channel of a transposed convolution",
            "one scale per tensor",
            fix="qconfig_mapping.set_object_type(torch.nn.ConvTranspose2d, "
            "QConfig(activation=..., weight=default_weight_observer))",
        )
    refused = _check(site, call) or _check_bias(site, call, engine)
    if refused:
        return refused
    if engine == "qnnpack" and len(geometry.stride) == 3:
        return site.refuse(ReasonCode.DIMENSIONS, "a transposed convolution in 3d", "1d and 2d")
    height_two = len(geometry.stride) == 2 and call.weight.weight.shape[2] == 2
    if engine == "fbgemm" and height_two and geometry.groups == 1:
        return site.refuse(
            ReasonCode.KERNEL_DEFECT,
            "a transposed convolution by fbgemm with a kernel of height 2",
            "another height, or groups: this kernel of torch returns undefined values",
            fix='backquant.quantize(..., backend="qnnpack")',
        )
    return _emit(site, call, f"conv_transpose{len(geometry.stride)}d", engine)


def _emit(site: Site, call: WeightedCall, operator: str, engine: str) -> Emit:
    assert call.x.qparams is not None and site.out is not None
    geometry = call.geometry or Geometry((), (), (), 1)
    config = QuantizedConfig(
        operator,
        engine,
        *call.x.qparams.args,
        *site.out.args,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        geometry.output_padding,
        geometry.groups,
        pads_before=_pads_before(site, call),
    )
    kernel = QuantizedWeighted(config, call.weight)
    return Emit(kernel, (call.x.node,), kernel.name, site.out)
