"""The library of kernels: found, checked, and registered with PyTorch, once in a process.

It is looked for in the folder that ``$BACKQUANT_KERNELS`` names, in this package (``libraries/``: compiled at
installation), and among those that ``backquant.native.build_kernels()`` has compiled on this machine.
``$BACKQUANT_KERNELS=off`` turns it off. A library is used only if

1. it was compiled from the sources of this version, and its file is undamaged,

2. the CPU has the instructions that it was built for, and ``ONEDNN_MAX_CPU_ISA`` does not forbid them (the
   fastest such library is taken),

3. PyTorch has the functions of its stable C interface that the library calls, and

4. its kernels compute right results on this CPU (``check``).

Otherwise models run on PyTorch's own kernels, and ``missing`` says why.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from backquant.native.build import build, is_whole, sources_digest
from backquant.native.instructions import InstructionSet, limit_said, usable
from backquant.native.packing import Layout
from backquant.native.plan import magic

#: Those whose kernels may be the library's.
ENGINES = ("x86", "onednn")
VARIABLE = "BACKQUANT_KERNELS"
_OFF = ("off", "0", "no", "false")
INSTALLED = Path(__file__).parent / "libraries"
_NAMESPACE = "backquant_kernels"
_NEEDED = "the kernels need Linux and a CPU with AVX2 at least, or an ARM one of 64 bits"
_OPERATORS = (
    *("convolution", "convolution_add", "linear", "averaged", "maxima", "gated", "rescaled"),
    *("quantized", "quantized_product", "quantized_planes", "looked_up", "shuffled"),
    *("joined", "joined_rescaled"),
    *("attention", "attention_biased", "attention_biased_twice"),
)

_lock = threading.RLock()
_found: list[str] = []  # why there is none; empty text: there is one
_held: list[Any] = []  # for as long as the process lives
_layouts: list[Layout] = []  # of the library that is held


def kernels_folder() -> Path:
    """Where ``backquant.native.build_kernels()`` puts the library."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "backquant" / "kernels"


def is_here() -> bool:
    """Whether the library runs in this process; the first call looks for it."""
    return not missing()


def missing() -> str:
    """Why the library does not run in this process; empty if it does."""
    if not _found:
        with _lock:
            if not _found:
                _found.append(_load())
    return _found[0]


def advice(engine: str) -> str:
    """One line on how models of ``engine`` would run faster here, where a library could run and does not."""
    if engine not in ENGINES or unusable() or not (reason := missing()):
        return ""
    return (
        f"backquant.native.build_kernels(): faster kernels than PyTorch's, which run now ({reason})"
    )


def layout() -> Layout:
    """How the library that runs in this process reads weights."""
    return _layouts[0]


def held() -> ctypes.CDLL:
    """The library that runs in this process."""
    library: ctypes.CDLL = _held[0]
    return library


def build_kernels() -> Path:
    """Compile the library for this machine; returns its path. It is used by new processes, and by this one if
    no quantized model has run in it yet.

    Raises ``EngineError`` without a compiler, and where no library can run.
    """
    from backquant.errors import EngineError, first_line

    sets = usable()
    if not sets:
        raise EngineError(
            f"the kernels cannot be used here: {_NEEDED}",
            where="backquant.native.build_kernels",
            fix="leave it out: models run on PyTorch's kernels",
        )
    try:
        return build(kernels_folder(), sets[0].name)
    except (FileNotFoundError, RuntimeError) as error:
        raise EngineError(
            f"the kernels cannot be built: {first_line(error)}",
            where="backquant.native.build_kernels",
            fix="apt-get install g++   # or CXX=/path/to/compiler",
        ) from error


def unusable() -> str:
    """Why no library can run here, whatever is installed; empty if one can."""
    if os.environ.get(VARIABLE, "").lower() in _OFF:
        return f"{VARIABLE} is {os.environ[VARIABLE]}"
    if not usable():
        limit = limit_said()
        return f"ONEDNN_MAX_CPU_ISA is {limit}" if limit and usable(limit="") else _NEEDED
    return ""


def _folders() -> Iterator[Path]:
    named = os.environ.get(VARIABLE)
    if named:
        yield Path(named)
    yield from (INSTALLED, kernels_folder())


def _load() -> str:
    reason = unusable()
    if reason:
        return reason
    reason = "the library is not installed; it needs g++"
    with torch.no_grad(), _disable_current_modes():  # no part of a recording
        for path, instructions in _libraries():
            reason = _start(path, instructions)
            if not reason:
                return ""
    return reason


def _libraries() -> Iterator[tuple[Path, InstructionSet]]:
    """The libraries that are here for this CPU, the fastest first."""
    for instructions in usable():
        for folder in _folders():
            for path in sorted(folder.glob(f"{sources_digest(instructions.name)}-*.so")):
                yield path, instructions


def _start(path: Path, instructions: InstructionSet) -> str:
    """Load the library at ``path``; returns what is wrong with it, or an empty text."""
    if _held:  # one library a process: what it registers stays
        return _checked(path)
    try:
        if not is_whole(path):
            return f"{path} is damaged: its bytes are not those that its name says"
        library = ctypes.CDLL(str(path))
        library.backquant_plan_layout.restype = ctypes.c_int64
        if library.backquant_plan_layout() != magic(instructions.layout):
            return f"{path} reads plans of another layout"
        library.backquant_register.restype = ctypes.c_char_p
        core = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        problem = library.backquant_register(str(core).encode())
    except (OSError, AttributeError) as error:
        return f"{path} cannot be loaded: {error}"
    if problem:
        return f"{path}: torch {torch.__version__} has no {problem.decode()}"
    _held.extend([library, _without_gradients()])
    _layouts.append(instructions.layout)
    return _checked(path)


def _checked(path: Path) -> str:
    from backquant.native.check import wrong

    found = wrong(layout())
    return f"{path}: {found}" if found else ""


def _without_gradients() -> Any:
    """Tell autograd that the operators have no gradients."""
    autograd = torch.library.Library(_NAMESPACE, "IMPL", "Autograd")
    for name in _OPERATORS:
        autograd.impl(name, torch.library.fallthrough_kernel)
    return autograd
