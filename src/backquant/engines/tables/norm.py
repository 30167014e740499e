"""Normalisations that convolutions did not absorb."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.dtypes import QParams
from backquant.engines.tables.arguments import (
    FAR_APART,
    RELUS,
    bind,
    integer_pair,
    is_computed,
    refuse_far_apart,
)
from backquant.engines.tables.weights import constant
from backquant.lower.kernels.norm import BatchNorm, BatchNormConfig, Norm, NormConfig
from backquant.lower.rule import Emit, LowerRule, Site
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode

BATCH_NORMS: dict[Any, int] = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}
_INSTANCE_NORMS: tuple[Any, ...] = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@dataclass(frozen=True)
class NormCall:
    """A normalisation with statistics of each input. ``kind``: layer, group or instance; ``size``: the
    normalised axes, or the number of groups; ``weight`` and ``bias``: one for each place or channel."""

    kind: str
    size: tuple[int, ...]
    eps: float
    weight: torch.Tensor | None
    bias: torch.Tensor | None


_Build = Callable[[Site], Emit | Reason]
_Make = Callable[[Site, NormCall], Emit | Reason]


def norm_rules() -> list[LowerRule]:
    """Rules for batch, layer, group and instance norm.

    >>> [rule.name for rule in norm_rules()][:3]
    ['batch norm + relu', 'batch norm', 'layer norm']
    """
    return norm_rules_of(_batch_norm, _emit)


def norm_rules_of(batch_norm: _Build, make: _Make) -> list[LowerRule]:
    """``norm_rules`` with kernels of one's own; ``batch_norm`` has stored statistics.

    >>> len(norm_rules_of(lambda site: None, lambda site, call: None))
    8
    """
    batch = tuple(BATCH_NORMS)
    others: list[tuple[str, tuple[Any, ...], Callable[[Site], NormCall | Reason]]] = [
        ("layer norm", (nn.LayerNorm,), _layer_norm),
        ("group norm", (nn.GroupNorm,), _group_norm),
        ("instance norm", _INSTANCE_NORMS, _instance_norm),
        ("functional layer norm", (F.layer_norm,), _functional_layer_norm),
        ("functional group norm", (F.group_norm,), _functional_group_norm),
        ("functional instance norm", (F.instance_norm,), _functional_instance_norm),
    ]
    return [
        LowerRule("batch norm + relu", (batch, RELUS), batch_norm),
        LowerRule("batch norm", (batch,), batch_norm),
        *(LowerRule(name, (keys,), partial(_made, read, make)) for name, keys, read in others),
    ]


def _made(read: Callable[[Site], NormCall | Reason], make: _Make, site: Site) -> Emit | Reason:
    call = read(site)
    return call if isinstance(call, Reason) else make(site, call)


def _batch_norm(site: Site) -> Emit | Reason:
    found = integer_pair(site)
    if isinstance(found, Reason):
        return found
    x, out = found
    module: Any = site.module
    if module.running_mean is None:
        return site.refuse(ReasonCode.STATISTICS, "batch norm that measures", "stored statistics")
    channels = module.running_mean
    ones, zeros = torch.ones_like(channels), torch.zeros_like(channels)
    tensors = {
        "weight": module.weight if module.weight is not None else ones,
        "bias": module.bias if module.bias is not None else zeros,
        "mean": module.running_mean,
        "var": module.running_var,
    }
    assert x.qparams is not None
    deviation = (module.running_var.double() + module.eps).sqrt()
    factor = (tensors["weight"].detach().double() / deviation).abs()
    if channels.numel() and x.qparams.scale * float(factor.max()) >= FAR_APART * out.scale:
        return refuse_far_apart(site)
    config = BatchNormConfig(
        BATCH_NORMS[site.steps[0].key],
        module.eps,
        len(site.steps) == 2,
        *_four(x.qparams, out),
    )
    kernel = BatchNorm(config, tensors)
    return Emit(kernel, (x.node,), kernel.name, out)


def _four(x: QParams | None, out: QParams) -> tuple[float, int, float, int]:
    assert x is not None
    return (*x.args, *out.args)


_FAR = 1e13  # times 255, squared and summed up: the end of float32


def _emit(site: Site, call: NormCall) -> Emit | Reason:
    found = integer_pair(site)
    if isinstance(found, Reason):
        return found
    x, out = found
    assert x.qparams is not None
    if x.qparams.scale >= _FAR:
        return site.refuse(
            ReasonCode.KERNEL_DEFECT,
            f"a scale of {x.qparams.scale:.0e}",
            f"scales below {_FAR:.0e}: further out the kernel's variances overflow",
        )
    config = NormConfig(call.kind, call.size, call.eps, *_four(x.qparams, out))
    kernel = Norm(config, call.weight, call.bias)
    return Emit(kernel, (x.node,), kernel.name, out)


def _layer_norm(site: Site) -> NormCall:
    module: Any = site.module
    size = tuple(module.normalized_shape)
    return NormCall("layer", size, module.eps, module.weight, module.bias)


def _group_norm(site: Site) -> NormCall:
    module: Any = site.module
    return NormCall("group", (module.num_groups,), module.eps, module.weight, module.bias)


def _instance_norm(site: Site) -> NormCall | Reason:
    module: Any = site.module
    if module.track_running_stats:
        return site.refuse(ReasonCode.STATISTICS, "stored statistics", "statistics of each input")
    return NormCall("instance", (), module.eps, module.weight, module.bias)


def _functional_layer_norm(site: Site) -> NormCall | Reason:
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    return _functional(site, "layer", names)


def _functional_group_norm(site: Site) -> NormCall | Reason:
    return _functional(site, "group", ("input", "num_groups", "weight", "bias", "eps"))


def _functional_instance_norm(site: Site) -> NormCall | Reason:
    names = (
        "input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum",
        "eps",
    )  # fmt: skip
    return _functional(site, "instance", names)


_DEFAULTS = {
    "weight": None,
    "bias": None,
    "eps": 1e-5,
    "running_mean": None,
    "running_var": None,
    "use_input_stats": True,
    "momentum": 0.1,
}


def _functional(site: Site, kind: str, names: tuple[str, ...]) -> NormCall | Reason:
    found = bind(site.node, names, {name: _DEFAULTS[name] for name in names if name in _DEFAULTS})
    if found is None or found.get("use_input_stats") is False or found.get("running_mean"):
        return site.refuse(
            ReasonCode.ARGUMENTS, "stored statistics or unknown arguments", "plain arguments"
        )
    affine = []
    for name in ("weight", "bias"):
        value = constant(site.graph_module, found[name])
        if found[name] is not None and value is None:
            return site.refuse(
                ReasonCode.COMPUTED_WEIGHT, f"a {name} that is computed", f"a constant {name}"
            )
        affine.append(value)
    size = found.get("normalized_shape", found.get("num_groups", ()))
    if kind == "layer" and affine[0] is not None:
        size = affine[0].shape  # the same, also where it is computed (self.weight.shape)
    sizes = tuple(size) if isinstance(size, (tuple, list)) else (size,)
    if is_computed((*sizes, found["eps"])):
        return site.refuse(ReasonCode.ARGUMENTS, "a size that is computed", "a literal size")
    return NormCall(kind, sizes, found["eps"], affine[0], affine[1])
