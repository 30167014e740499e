"""The modules that patterns become; sub-packages load when they are asked for.

``intrinsic`` (fused), ``intrinsic.qat`` and ``qat`` (training), ``quantized.reference`` (integer
weights, float computation), ``quantizable`` (rebuilt so that observers reach their inside).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backquant.nn import intrinsic, qat, quantizable, quantized
    from backquant.nn.stubs import DeQuantStub, QuantStub, QuantWrapper

__all__ = [
    "DeQuantStub",
    "QuantStub",
    "QuantWrapper",
    "intrinsic",
    "qat",
    "quantizable",
    "quantized",
]


def __getattr__(name: str) -> Any:
    if name in ("intrinsic", "qat", "quantizable", "quantized"):
        return importlib.import_module(f"{__name__}.{name}")
    if name in ("DeQuantStub", "QuantStub", "QuantWrapper"):
        return getattr(importlib.import_module(f"{__name__}.stubs"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
