"""The parts of TorchInductor that its own code generators use: private to torch, imported here alone.

Whoever compiles imports this module first. Where a version of torch lacks a part, ``check_inductor`` says so;
models then run as they are, uncompiled.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from backquant.errors import EngineError

__all__ = [
    "CppTemplate",
    "V",
    "check_inductor",
    "constant_pad_nd",
    "ir",
    "lowerings",
    "register_lowering",
    "view",
]


try:
    # imported first: the modules below import each other circularly
    import torch._inductor.lowering
    from torch._inductor import ir
    from torch._inductor.codegen.cpp_template import CppTemplate
    from torch._inductor.lowering import constant_pad_nd, lowerings, register_lowering, view
    from torch._inductor.virtualized import V

    _missing = ""
except ImportError as error:
    _missing = str(error)


def check_inductor() -> None:
    """Raise ``EngineError`` where this version of torch lacks a part."""
    if _missing:
        raise EngineError(
            f"this version of torch lacks a part of Inductor that our kernels are compiled with: {_missing}",
            where=f"QuantizedModel.compile, torch {torch.__version__.split('+')[0]}",
            fix="call the model as it is: quantized(x)",
        )


# The C++ compiler that Inductor needs.

_PROBE = "#include <sstream>\nvoid write(std::ostringstream& to) { to << 1.5; }\n"
_RUNTIMES = (b"libstdc++.", b"libc++.")


def check_compiler() -> None:
    """Raise ``EngineError`` when there is no C++ compiler (``$CXX``, ``g++`` or ``clang++``), and when what
    it links cannot be loaded beside PyTorch."""
    names = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise EngineError(
            "there is no C++ compiler, and the model is compiled with one",
            where=f"PATH has none of {', '.join(names)}",
            fix="apt-get install g++   # or CXX=/path/to/compiler",
        )
    if _links_a_runtime(found):
        raise EngineError(
            "the C++ compiler links its libraries statically, and loading such code beside PyTorch's copy of "
            "them ends the process",
            where=f"{found}: what it links needs no libstdc++.so",
            fix="CXX=/usr/bin/g++   # a compiler that links libstdc++ dynamically",
        )


@cache
def _links_a_runtime(compiler: str) -> bool:
    """Whether libraries by this compiler hold the C++ runtime instead of naming it."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "probe.so"
        command = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(made)]
        done = subprocess.run(command, input=_PROBE.encode(), capture_output=True, check=False)
        if done.returncode:
            return False  # Inductor's own call says what is wrong
        linked = made.read_bytes()
    return not any(name in linked for name in _RUNTIMES)
