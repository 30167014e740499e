"""What a QAT module takes from a QConfig: the fake quantize of its weight."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrize import (
    is_parametrized,
    transfer_parametrizations_and_params,
    type_before_parametrizations,
)

from backquant.errors import ConfigError

_Float = TypeVar("_Float", bound=nn.Module)


def weight_fake_quant_of(qconfig: Any, owner: str, device: torch.device | None = None) -> nn.Module:
    """A new fake quantize module from ``qconfig.weight``, on ``device``.

    Raises ``ConfigError`` when ``qconfig`` is missing or its ``weight`` gives no module.

    >>> from types import SimpleNamespace
    >>> weight_fake_quant_of(SimpleNamespace(weight=nn.Identity), "qat.Linear")
    Identity()
    """
    make = getattr(qconfig, "weight", None)
    fake_quant = make() if callable(make) else None
    if not isinstance(fake_quant, nn.Module):
        raise ConfigError(
            f"{owner} needs a QConfig whose weight is a fake quantize class, got {qconfig!r}",
            where=f"{owner}(..., qconfig=...)",
            fix="qconfig=backquant.get_default_qat_qconfig('x86')",
        )
    on_device = device is None or device.type == "meta"
    return fake_quant if on_device else fake_quant.to(device)


def checked_float_module(cls: type[nn.Module], module: nn.Module, expected: type[_Float]) -> _Float:
    """``module``, if it is exactly an ``expected`` with a ``qconfig``; else ``ConfigError``.

    >>> module = nn.Linear(1, 1); module.qconfig = "any"
    >>> checked_float_module(nn.Linear, module, nn.Linear) is module
    True
    """
    kind = type_before_parametrizations(module)
    if kind is not expected:
        raise ConfigError(
            f"{cls.__name__}.from_float takes a {expected.__module__}.{expected.__name__}, "
            f"got {kind.__module__}.{kind.__name__}",
            where=f"{cls.__module__}.{cls.__name__}.from_float(module)",
            fix="BackendPatternConfig(...).set_qat_module(the QAT class of that module)",
        )
    if not getattr(module, "qconfig", None):
        raise ConfigError(
            f"the {kind.__name__} to train has no qconfig",
            where=f"{cls.__module__}.{cls.__name__}.from_float(module)",
            fix="module.qconfig = backquant.get_default_qat_qconfig('x86')",
        )
    assert isinstance(module, expected)
    return module


def fresh_float_copy(float_module: _Float, qat_module: nn.Module) -> _Float:
    """Give ``float_module`` copies of weight and bias of ``qat_module``, and its training flag.

    >>> fresh_float_copy(nn.Linear(2, 1, device="meta"), nn.Linear(2, 1)).weight.device.type
    'cpu'
    """
    for name in ("weight", "bias"):
        if not hasattr(qat_module, name):  # embeddings have no bias
            continue
        value = getattr(qat_module, name)
        copy = None if value is None else nn.Parameter(value.detach().clone(), value.requires_grad)
        float_module.register_parameter(name, copy)
    float_module.train(qat_module.training)
    return float_module


def adopt(qat: nn.Module, root: nn.Module, float_module: nn.Module) -> None:
    """Finish ``from_float``: parameters of ``root``, device and training flag.

    >>> a, b = nn.Linear(1, 1, device="meta"), nn.Linear(1, 1).eval()
    >>> adopt(a, b, b); a.weight is b.weight, a.training
    (True, False)
    """
    take_parameters(qat, root)
    weight = root.weight
    if isinstance(weight, torch.Tensor) and "weight_fake_quant" in qat._modules:
        qat.get_submodule("weight_fake_quant").to(weight.device)
    qat.train(float_module.training)


def take_parameters(qat: nn.Module, linear: nn.Module) -> None:
    """Let ``qat`` share weight and bias of ``linear``, with their parametrizations.

    Raises ``ConfigError`` for a weight that a hook computes (``nn.utils.weight_norm``, ``prune``).

    >>> a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    >>> take_parameters(a, b); a.weight is b.weight
    True
    """
    for name in ("weight", "bias"):
        if is_parametrized(linear, name):
            qat.register_parameter(name, nn.Parameter(_a_value(linear, name).detach()))
            transfer_parametrizations_and_params(linear, qat, name)
        elif hasattr(linear, name):  # embeddings have no bias
            value = getattr(linear, name)
            if value is not None and not isinstance(value, nn.Parameter):
                raise ConfigError(
                    f"a {name} that is computed by a hook (old weight norm, pruning) cannot be trained",
                    where=f"{linear}",
                    fix=f"torch.nn.utils.prune.remove(module, '{name}')  # or remove_weight_norm, or "
                    "torch.nn.utils.parametrizations.weight_norm instead",
                )
            setattr(qat, name, value)


def _a_value(module: nn.Module, name: str) -> torch.Tensor:
    """A tensor to set parametrizations up with: the original, whose use changes none of their state."""
    parametrized = module.parametrizations[name]  # type: ignore[index]
    original: torch.Tensor | None = getattr(parametrized, "original", None)
    return getattr(module, name) if original is None else original
