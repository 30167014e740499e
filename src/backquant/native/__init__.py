"""Kernels of our own, in C++: their sources, the layouts of their weights, and a library compiled from them.

``QuantizedModel.compile`` includes ``kernels.h``, ``tiles.h`` and ``attention.h`` in the code that it
generates for a model. ``library.cpp`` compiles them to one library for any model and shape, which lowered
models call where it is installed (``library``, ``build``). ``plan`` describes such a call, as bytes.
``measuring`` calls it for what observers measure (``measure.h``).
"""

from __future__ import annotations

from backquant.native.build import SOURCES
from backquant.native.library import build_kernels, missing

__all__ = ["SOURCES", "build_kernels", "missing"]
