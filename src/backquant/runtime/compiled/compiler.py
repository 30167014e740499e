"""The C++ compiler that Inductor needs."""

from __future__ import annotations

import os
import shutil

from backquant.errors import EngineError


def check_compiler() -> None:
    """Raise ``EngineError`` when there is no C++ compiler: ``$CXX``, ``g++`` or ``clang++``."""
    names = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    if not any(shutil.which(name) for name in names):
        raise EngineError(
            "there is no C++ compiler, and the model is compiled with one",
            where=f"PATH has none of {', '.join(names)}",
            fix="apt-get install g++   # or CXX=/path/to/compiler",
        )
