"""Compiled models: a lowered graph as C++ code, with kernels of our own for convolutions and linear layers.

``graph`` spells the kernels of a lowered graph (``functions``, ``modules``) in operators that can be
compiled: torch's, and three of ours (``operators``). ``program`` has AOTInductor compile it; of our operators
it makes (``lowerings``, ``template``) calls of the kernels in ``kernels.h``. ``model`` is what users hold.
"""

from __future__ import annotations

from backquant.runtime.compiled.model import Compilation, CompiledModel, compiled

__all__ = ["Compilation", "CompiledModel", "compiled"]
