"""Modules with quantized weights.

``reference`` are those that a reference model is made of. ``LSTM``, ``LSTMCell`` and
``MultiheadAttention`` are the quantized forms of the classes in ``nn.quantizable``.
``FloatFunctional`` stands for elementwise functions in eager-mode style models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backquant.nn.quantizable.slots import FloatFunctional
    from backquant.nn.quantized import reference
    from backquant.nn.quantized.composed import LSTM, LSTMCell, MultiheadAttention

_CONV = tuple(f"Conv{kind}{n}d" for kind in ("", "Transpose") for n in (1, 2, 3))
_FUNCTIONS = (
    "BatchNorm2d", "BatchNorm3d", "Dropout", "ELU", "GroupNorm", "Hardswish", "InstanceNorm1d",
    "InstanceNorm2d", "InstanceNorm3d", "LayerNorm", "LeakyReLU", "PReLU", "Softmax",
)  # fmt: skip
_HOMES = {
    "Linear": "linear",
    **dict.fromkeys(_CONV, "conv"),
    **dict.fromkeys(_FUNCTIONS, "functions"),
    **dict.fromkeys(("DeQuantize", "QFunctional", "Quantize"), "functional_modules"),
}

__all__ = ["LSTM", "FloatFunctional", "LSTMCell", "MultiheadAttention", "reference"]

_COMPOSED = ("LSTM", "LSTMCell", "MultiheadAttention")


def __getattr__(name: str) -> Any:
    if name == "reference":
        return importlib.import_module(f"{__name__}.{name}")
    if name in _COMPOSED:
        return getattr(importlib.import_module(f"{__name__}.composed"), name)
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name == "FloatFunctional":
        return importlib.import_module("backquant.nn.quantizable.slots").FloatFunctional
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
