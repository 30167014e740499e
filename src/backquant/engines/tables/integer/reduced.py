"""Pooling, means, softmax and normalisations of the integer reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from backquant.engines.tables.arguments import first_operand, refuse_float_input
from backquant.engines.tables.integer.lookup_tables import emit, one_operand, result_fields
from backquant.engines.tables.norm import NormCall, norm_rules_of
from backquant.engines.tables.pointwise import softmax_dim
from backquant.engines.tables.pooling import (
    PADS,
    RESIZES,
    adaptive_sizes,
    average_window,
    max_window,
    mean_dims,
    pad_arguments,
    resize_arguments,
)
from backquant.lower.kernels.integer.normalized import (
    LARGEST_EPS,
    BatchNormConfig,
    IntegerBatchNorm,
    IntegerNorm,
    IntegerSoftmax,
    NormConfig,
    SoftmaxConfig,
    exponentials,
    norm_numbers,
)
from backquant.lower.kernels.integer.pooling import (
    AverageConfig,
    IntegerAverage,
    IntegerMaxPool,
    MaxPoolConfig,
)
from backquant.lower.kernels.integer.resize import BilinearConfig, IntegerBilinear, nearest, padded
from backquant.lower.qdq import quantized_value
from backquant.lower.rule import Emit, LowerRule, Site
from backquant.match.plan import Reason
from backquant.nn.quantized.reference import Embedding, EmbeddingBag
from backquant.operators import spellings
from backquant.reason_codes import ReasonCode

_GAMMA_LIMIT = (1 << 15) - 1
_MOST = 2.0**52  # of a bias in integer steps


def pooling_rules() -> list[LowerRule]:
    """Rules for maxima, averages and means.

    >>> [rule.name for rule in pooling_rules()][:3]
    ['max_pool1d', 'avg_pool1d', 'adaptive_avg_pool1d']
    """
    found = []
    kinds: dict[str, Callable[[int, Site], Emit | Reason]] = {
        "max_pool": _max_pool,
        "avg_pool": _average_pool,
        "adaptive_avg_pool": _adaptive_pool,
    }
    for dims in (1, 2, 3):
        for kind, build in kinds.items():
            name = f"{kind}{dims}d"
            found.append(LowerRule(name, (spellings(name),), partial(build, dims)))
    return [*found, LowerRule("mean", ((torch.mean, "mean"),), _mean)]


def _max_pool(dims: int, site: Site) -> Emit | Reason:
    x, window = first_operand(site), max_window(site, dims)
    if isinstance(window, Reason):
        return window
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    config = MaxPoolConfig(
        f"max_pool{dims}d",
        tuple(window.size),
        tuple(window.stride),
        tuple(window.padding),
        tuple(window.dilation),
        window.ceil_mode,
    )
    kernel = IntegerMaxPool(config)
    return Emit(kernel, (x.node,), kernel.name, x.qparams, in_range=True)


def _average_pool(dims: int, site: Site) -> Emit | Reason:
    window = average_window(site, dims)
    if isinstance(window, Reason):
        return window
    numbers = {
        "kernel_size": tuple(window.size),
        "stride": tuple(window.stride),
        "padding": tuple(window.padding),
        "ceil_mode": window.ceil_mode,
        "count_include_pad": window.count_include_pad,
        "divisor_override": window.divisor_override,
    }
    return _averaged(site, "avg_pool", numbers)


def _adaptive_pool(dims: int, site: Site) -> Emit | Reason:
    sizes = adaptive_sizes(site, dims)
    if isinstance(sizes, Reason):
        return sizes
    return _averaged(site, "adaptive_avg_pool", {"output_size": tuple(sizes)})


def _mean(site: Site) -> Emit | Reason:
    found = mean_dims(site)
    if isinstance(found, Reason):
        return found
    return _averaged(site, "mean", {"dim": tuple(found[0]), "keepdim": found[1]})


def _averaged(site: Site, operator: str, numbers: dict[str, Any]) -> Emit | Reason:
    found = one_operand(site)
    if isinstance(found, Reason):
        return found
    node, x, out = found
    config = AverageConfig(
        **result_fields(site, out),
        operator=operator,
        x_scale=x.scale,
        x_zero_point=x.zero_point,
        **numbers,
    )
    return emit(site, IntegerAverage(config), node)


def softmax_rules() -> list[LowerRule]:
    """The rule for softmax.

    >>> [rule.name for rule in softmax_rules()]
    ['softmax']
    """
    return [LowerRule("softmax", (spellings("softmax"),), _softmax)]


def _softmax(site: Site) -> Emit | Reason:
    found, dim = one_operand(site), softmax_dim(site)
    if isinstance(found, Reason):
        return found
    if isinstance(dim, Reason):
        return dim
    node, x, out = found
    config = SoftmaxConfig(**result_fields(site, out), dim=dim)
    return emit(
        site, IntegerSoftmax(config, table=exponentials(x.scale, x.dtype, site.table_entries)), node
    )


def norm_rules() -> list[LowerRule]:
    """Rules for batch, layer, group and instance norm.

    >>> len(norm_rules())
    8
    """
    return norm_rules_of(_batch_norm, _norm)


def _batch_norm(site: Site) -> Emit | Reason:
    found = one_operand(site)
    if isinstance(found, Reason):
        return found
    node, x, out = found
    module: Any = site.module
    if module.running_mean is None:
        return site.refuse(ReasonCode.STATISTICS, "batch norm that measures", "stored statistics")
    factor = torch.rsqrt(module.running_var.detach().double() + module.eps)
    if module.weight is not None:
        factor = factor * module.weight.detach().double()
    shift = -module.running_mean.detach().double() * factor
    if module.bias is not None:
        shift = shift + module.bias.detach().double()
    fields = result_fields(site, out)
    if len(site.steps) == 2:
        fields["quant_min"] = max(out.quant_min, quantized_value(0.0, out))
    affine = _integers(site, factor, shift, x.scale)
    if isinstance(affine, Reason):
        return affine
    scale, gamma, beta = affine
    config = BatchNormConfig(
        **fields, x_scale=x.scale, x_zero_point=x.zero_point, gamma_scale=scale
    )
    return emit(site, IntegerBatchNorm(config, gamma=gamma, beta=beta), node)


def _norm(site: Site, call: NormCall) -> Emit | Reason:
    found = one_operand(site)
    if isinstance(found, Reason):
        return found
    node, x, out = found
    channels = call.weight.shape if call.weight is not None else torch.Size([1])
    gamma, beta = torch.ones(channels).double(), torch.zeros(channels).double()
    gamma = gamma if call.weight is None else call.weight.detach().double()
    beta = beta if call.bias is None else call.bias.detach().double()
    fields = result_fields(site, out)
    if call.eps > x.scale**2 * LARGEST_EPS:
        return site.refuse(
            ReasonCode.KERNEL_DEFECT,
            "an eps beyond 2**61 squares of the input's steps",
            "a larger scale: further out sums leave 64 bits",
        )
    numbers: dict[str, Any] = norm_numbers(call.eps, x.scale, x.dtype, fields["requantization"])
    affine = _integers(site, gamma, beta, 2.0 ** -numbers["norm_bits"])
    if isinstance(affine, Reason):
        return affine
    scale, factors, biases = affine
    config = NormConfig(**fields, **numbers, kind=call.kind, size=call.size, gamma_scale=scale)
    return emit(site, IntegerNorm(config, gamma=factors, beta=biases), node)


def _integers(
    site: Site, factor: torch.Tensor, bias: torch.Tensor, step: float
) -> tuple[float, torch.Tensor, torch.Tensor] | Reason:
    """The scale of factors of 16 bits, these, and biases in steps of ``step`` times that scale."""
    scale = float(factor.abs().max()) / _GAMMA_LIMIT or 1.0
    gamma, beta = torch.round(factor / scale), torch.round(bias / (scale * step))
    if not bool((beta.abs() < _MOST).all()):
        return site.refuse(
            ReasonCode.KERNEL_DEFECT,
            "a bias beyond 2**52 of its integer steps",
            "a bias of the magnitude of the normalised values",
        )
    return scale, gamma.to(torch.int64), beta.to(torch.int64)


# Interpolation, padding and rows of tables of the integer reference.


def resize_rules() -> list[LowerRule]:
    """Rules for interpolation and padding.

    >>> [rule.name for rule in resize_rules()]
    ['interpolate', 'pad']
    """
    return [
        LowerRule("interpolate", (RESIZES,), _interpolate),
        LowerRule("pad", ((F.pad, *PADS),), _pad),
    ]


def _interpolate(site: Site) -> Emit | Reason:
    found, x = resize_arguments(site), first_operand(site)
    if isinstance(found, Reason):
        return found
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    size, factor, mode = (found[name] for name in ("size", "scale_factor", "mode"))
    exactly = found["recompute_scale_factor"]
    if mode in ("nearest", "nearest-exact"):
        args = (x.node, size, factor, mode, exactly)
        return Emit(nearest, args, f"integer.{mode}", x.qparams, in_range=True)
    if mode != "bilinear":
        return site.refuse(ReasonCode.MODE, mode, "nearest, nearest-exact, bilinear")
    if any(isinstance(each, Node) for each in _each(factor)):
        return site.refuse(ReasonCode.ARGUMENTS, "a computed scale factor", "a literal factor")
    pair = one_operand(site)
    if isinstance(pair, Reason):
        return pair
    node, own, out = pair
    config = BilinearConfig(
        **result_fields(site, out),
        x_scale=own.scale,
        x_zero_point=own.zero_point,
        align_corners=bool(found["align_corners"]),
        recompute_scale_factor=bool(exactly),
        scale_factor=tuple(float(each) for each in _each(factor)),
    )
    return emit(site, IntegerBilinear(config), node, size)


def _each(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _pad(site: Site) -> Emit | Reason:
    x, found = first_operand(site), pad_arguments(site)
    if isinstance(found, Reason):
        return found
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    pad, mode, value = found
    args = (x.node, pad, mode, quantized_value(value, x.qparams))
    return Emit(padded, args, f"integer.pad({mode})", x.qparams, in_range=True)


def embedding_rules() -> list[LowerRule]:
    """The rule for tables of integers, whose rows are floats where they are read.

    >>> [rule.name for rule in embedding_rules()]
    ['embedding']
    """
    return [LowerRule("embedding", ((Embedding, EmbeddingBag),), _rows)]


def _rows(site: Site) -> Emit:
    """The reference module itself: it picks integers and dequantizes them."""
    return Emit(site.module, site.node.args, "integer.rows", None, site.node.kwargs)
