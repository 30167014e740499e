"""Filling the slots of a quantizable module with observers, or with fake quantizes for training."""

from __future__ import annotations

from typing import Any

from torch import nn

from backquant.errors import ConfigError
from backquant.nn.qat.weight_fake_quantizer import adopt
from backquant.nn.quantizable.slots import (
    Slot,
    SlotLinear,
    SlotQATLinear,
    SlotSigmoid,
    SlotTanh,
)
from backquant.observe import (
    default_fixed_qparams_range_0to1_fake_quant,
    default_fixed_qparams_range_neg1to1_fake_quant,
)

_RANGE_0_TO_1 = default_fixed_qparams_range_0to1_fake_quant
_RANGE_NEG1_TO_1 = default_fixed_qparams_range_neg1to1_fake_quant


def require_qconfig(module: nn.Module, owner: str, qconfig: Any = None) -> Any:
    """The ``qconfig`` of ``module``, or the one given; ``ConfigError`` when there is neither.

    >>> require_qconfig(nn.LSTM(1, 1), "quantizable.LSTM", "given")
    'given'
    """
    found = getattr(module, "qconfig", None) or qconfig
    if found:
        return found
    raise ConfigError(
        f"the {type(module).__name__} to observe has no qconfig",
        where=f"backquant.nn.{owner}.from_float(module)",
        fix="module.qconfig = backquant.get_default_qconfig('x86')",
    )


def _post_process(module: Slot, qconfig: Any) -> nn.Module | None:
    """Sigmoid and tanh have fixed qparams, which training must feel and calibration need not
    measure; everything else is measured.
    """
    made: nn.Module
    if isinstance(module, (SlotSigmoid, SlotTanh)):
        if not module.training:
            return None
        in_0_to_1 = isinstance(module, SlotSigmoid)
        made = (_RANGE_0_TO_1 if in_0_to_1 else _RANGE_NEG1_TO_1)()
    else:
        made = qconfig.activation()
    return made


def _device_of(module: nn.Module) -> Any:
    parameter = next(module.parameters(), None)
    return None if parameter is None else parameter.device


def observe(module: nn.Module, qconfig: Any) -> None:
    """Fill every slot below ``module`` in place, with new observers from ``qconfig.activation``.

    A part with a ``qconfig`` of its own uses that one; a part whose ``qconfig`` is ``None`` stays
    in float. In training mode the linears' weights are fake-quantized, too.

    >>> from types import SimpleNamespace
    >>> block = nn.Sequential(SlotLinear(1, 1)).eval()
    >>> observe(block, SimpleNamespace(activation=nn.Identity, weight=nn.Identity))
    >>> block[0].activation_post_process
    Identity()
    """
    device = _device_of(module)
    for name, part in list(module.named_modules()):
        own = getattr(part, "qconfig", qconfig)
        if not isinstance(part, Slot) or own is None:
            continue
        trains = part.training and isinstance(part, SlotLinear)
        leaf = _trained(module, name, part, own) if trains else part
        slot = _post_process(leaf, own)
        leaf.activation_post_process = slot if slot is None else slot.to(device)


def _trained(module: nn.Module, name: str, part: nn.Module, qconfig: Any) -> SlotQATLinear:
    assert isinstance(part, SlotLinear)
    swapped = SlotQATLinear(
        part.in_features, part.out_features, part.bias is not None, qconfig, device="meta"
    )
    adopt(swapped, part, part)
    parent, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(parent), attribute, swapped)
    return swapped
