"""Switches for ``model.apply``: measuring and rounding of every fake-quantizer in a model."""

from __future__ import annotations

from torch import nn

from backquant.observe.protocol import is_fake_quantize


def disable_fake_quant(mod: nn.Module) -> None:
    """Let ``mod`` return its input unrounded, if it is a fake-quantizer.

    >>> from backquant.observe import FakeQuantize
    >>> model = nn.Sequential(FakeQuantize())
    >>> _ = model.apply(disable_fake_quant)
    >>> model[0].fake_quant_enabled.item()
    0
    """
    if is_fake_quantize(mod):
        mod.disable_fake_quant()  # type: ignore[operator]


def enable_fake_quant(mod: nn.Module) -> None:
    """Let ``mod`` round, if it is a fake-quantizer.

    >>> from backquant.observe import FakeQuantize
    >>> model = nn.Sequential(FakeQuantize())
    >>> _ = model.apply(disable_fake_quant).apply(enable_fake_quant)
    >>> model[0].fake_quant_enabled.item()
    1
    """
    if is_fake_quantize(mod):
        mod.enable_fake_quant()  # type: ignore[operator]


def disable_observer(mod: nn.Module) -> None:
    """Let ``mod`` keep its scale and zero point, if it is a fake-quantizer.

    >>> from backquant.observe import FakeQuantize
    >>> model = nn.Sequential(FakeQuantize())
    >>> _ = model.apply(disable_observer)
    >>> model[0].observer_enabled.item()
    0
    """
    if is_fake_quantize(mod):
        mod.disable_observer()  # type: ignore[operator]


def enable_observer(mod: nn.Module) -> None:
    """Let ``mod`` measure, if it is a fake-quantizer.

    >>> from backquant.observe import FakeQuantize
    >>> model = nn.Sequential(FakeQuantize())
    >>> _ = model.apply(disable_observer).apply(enable_observer)
    >>> model[0].observer_enabled.item()
    1
    """
    if is_fake_quantize(mod):
        mod.enable_observer()  # type: ignore[operator]
