"""Compiled models: a lowered graph as C++ code, with kernels of our own for convolutions and linear layers.

``graph`` spells the kernels of a lowered graph (``functions``, ``modules``) in operators that can be
compiled: torch's, and three of ours (``operators``). ``program`` has AOTInductor compile it; of our operators
it makes (``lowerings``, ``template``) calls of the kernels in ``kernels.h``. ``model`` is the way there.
"""

from __future__ import annotations

from backquant.runtime.compiled.model import Compilation, compile_lowered

__all__ = ["Compilation", "compile_lowered"]
