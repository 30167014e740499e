"""Kernels of our own, in C++: their sources, the layouts that they read, and a library that is built of them.

``kernels.h`` and ``tiles.h`` are what ``QuantizedModel.compile`` writes into models; ``library.cpp`` makes
one library of them, for any model and any shape, that the lowered model's own calls use where it is there
(``library``, ``build``). ``plan`` says what such a call does, in bytes.
"""

from __future__ import annotations

from backquant.native.build import SOURCES
from backquant.native.library import build_kernels, missing

__all__ = ["SOURCES", "build_kernels", "missing"]
