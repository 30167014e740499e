"""What counts as an observer or a fake-quantizer: ours, or any module with the same methods.

A class written against PyTorch's base classes is recognised by its methods, or, for kinds that
differ only in meaning, by the name of the class in its inheritance; nothing of PyTorch's own
quantization package is imported.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def is_observer_or_fake_quantize(module: Any) -> bool:
    """Whether ``module`` is an ``nn.Module`` that measures: it has ``calculate_qparams`` and a dtype.

    >>> import torch
    >>> from backquant.observe import MinMaxObserver
    >>> is_observer_or_fake_quantize(MinMaxObserver()), is_observer_or_fake_quantize(nn.ReLU())
    (True, False)
    """
    if not isinstance(module, nn.Module):
        return False
    if not callable(getattr(module, "calculate_qparams", None)):
        return False
    return any(hasattr(module, name) for name in ("dtype", "target_dtype", "fake_quant_enabled"))


def lacks_of_observer(module: Any) -> str:
    """What ``module`` lacks to be an observer, in words; empty if it is one.

    >>> lacks_of_observer(nn.ReLU())
    'it has no method calculate_qparams() and no attribute dtype'
    """
    if is_observer_or_fake_quantize(module):
        return ""
    if not isinstance(module, nn.Module):
        return "it is no nn.Module"
    lacks = []
    if not callable(getattr(module, "calculate_qparams", None)):
        lacks.append("no method calculate_qparams()")
    if not any(hasattr(module, name) for name in ("dtype", "target_dtype", "fake_quant_enabled")):
        lacks.append("no attribute dtype")
    return f"it has {' and '.join(lacks)}"


def is_fake_quantize(module: Any) -> bool:
    """Whether ``module`` is a fake-quantizer: an observer whose rounding can be switched.

    >>> from backquant.observe import FakeQuantize, MinMaxObserver
    >>> is_fake_quantize(FakeQuantize()), is_fake_quantize(MinMaxObserver())
    (True, False)
    """
    return is_observer_or_fake_quantize(module) and all(
        callable(getattr(module, name, None))
        for name in (
            "enable_fake_quant",
            "disable_fake_quant",
            "enable_observer",
            "disable_observer",
        )
    )


def is_placeholder(module: Any) -> bool:
    """Whether ``module`` only carries a dtype: a ``PlaceholderObserver`` of ours or PyTorch's.

    >>> from backquant.observe import PlaceholderObserver
    >>> is_placeholder(PlaceholderObserver())
    True
    """
    return _descends_from(module, "PlaceholderObserver")


def is_noop(module: Any) -> bool:
    """Whether ``module`` is a ``NoopObserver``.

    >>> from backquant.observe import NoopObserver
    >>> is_noop(NoopObserver())
    True
    """
    return _descends_from(module, "NoopObserver")


def is_reuse_input(module: Any) -> bool:
    """Whether ``module`` asks for the observer of the operator's input: a ``ReuseInputObserver``.

    >>> from backquant.observe import ReuseInputObserver
    >>> is_reuse_input(ReuseInputObserver())
    True
    """
    return _descends_from(module, "ReuseInputObserver")


def is_fixed_qparams(module: Any) -> bool:
    """Whether scale and zero point are given instead of measured, in an observer or fake-quantizer.

    >>> from backquant.observe import default_fixed_qparams_range_0to1_fake_quant
    >>> is_fixed_qparams(default_fixed_qparams_range_0to1_fake_quant())
    True
    """
    return _descends_from(module, "FixedQParamsObserver") or _descends_from(
        module, "FixedQParamsFakeQuantize"
    )


def _descends_from(module: Any, name: str) -> bool:
    return isinstance(module, nn.Module) and any(
        cls.__name__ == name for cls in type(module).__mro__
    )
