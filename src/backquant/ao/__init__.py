"""PyTorch's module paths: ``backquant.ao`` offers what ``torch.ao`` does, under the same names.

    sed 's/torch\\.ao\\./backquant.ao./g'

migrates a project. ``names.txt`` says of every name of ``torch.ao.quantization`` and ``torch.ao.nn`` where
its counterpart is, and of those that are left out why. Modules are made from that table when they are
imported, and names are resolved when they are first read, so that nothing is loaded before it is used.

>>> import backquant
>>> import backquant.ao.nn.intrinsic as nni
>>> from backquant.ao.quantization.quantize_fx import prepare_fx
>>> nni.ConvReLU2d.__module__, prepare_fx is backquant.prepare_fx
('backquant.nn.intrinsic.fused', True)
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from backquant.ao.modules import Finder

__all__ = ["nn", "quantization"]

if not any(isinstance(finder, Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, Finder())


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
