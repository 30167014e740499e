"""Building the library of kernels: one call of a C++ compiler for each instruction set, once for all models.

Imports nothing but Python's standard library, so that installing needs no PyTorch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent
FILES = (
    *("lanes.h", "lanes_x86.h", "lanes_arm.h"),
    *("kernels.h", "grouped.h", "images.h", "attention.h", "tiles.h", "measure.h", "library.cpp"),
)
_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", "-Wno-ignored-attributes")
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")

#: The sets of instructions that there is a library for, and what the compiler is told; what a
#: CPU must have stands below.
FLAGS = {
    "amx": (*_FLAGS, *_AVX512, "-mavx512vnni", "-DBACKQUANT_TILED"),
    "avx512_vnni": (*_FLAGS, *_AVX512, "-mavx512vnni"),
    "avx_vnni": (*_FLAGS, *_AVX2, "-mavxvnni"),
    "avx512": (*_FLAGS, *_AVX512),
    "avx2": (*_FLAGS, *_AVX2),
    "neon_i8mm": (*_FLAGS, "-march=armv8.2-a+dotprod+i8mm"),
    "neon_dot": (*_FLAGS, "-march=armv8.2-a+dotprod"),
    "neon": (*_FLAGS, "-march=armv8-a"),
}

#: Those of a machine, as ``platform.machine()`` names it.
MACHINES = {
    "x86_64": ("amx", "avx512_vnni", "avx_vnni", "avx512", "avx2"),
    "aarch64": ("neon_i8mm", "neon_dot", "neon"),
}
_AVX512_CPU = ("avx2", "fma3", "avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")

#: What a CPU must have for each, in the words of ``torch.cpu.get_capabilities()``, or of Linux on ARM.
NEEDED = {
    "amx": (*_AVX512_CPU, "avx512_vnni", "amx_int8"),
    "avx512_vnni": (*_AVX512_CPU, "avx512_vnni"),
    "avx_vnni": ("avx2", "fma3", "avx_vnni"),
    "avx512": _AVX512_CPU,
    "avx2": ("avx2", "fma3"),
    "neon_i8mm": ("asimd", "asimddp", "i8mm"),
    "neon_dot": ("asimd", "asimddp"),
    "neon": ("asimd",),
}

#: Which ones an installation compiles: ``off``, ``all``, or names; ``own`` if it is not set.
CHOICE = "BACKQUANT_BUILD_KERNELS"
_CPUINFO = Path("/proc/cpuinfo")
_DIGITS = 16


def sources_digest(instructions: str) -> str:
    """The digest of the sources and of the compiler's options for one of ``FLAGS``: the first part of the
    library's file name.

    >>> len(sources_digest("avx2")), sources_digest("avx2") == sources_digest("avx512_vnni")
    (16, False)
    """
    digest = hashlib.sha256(" ".join(FLAGS[instructions]).encode())
    for name in FILES:
        digest.update((SOURCES / name).read_bytes())
    return digest.hexdigest()[:_DIGITS]


def find_compiler() -> str | None:
    """The first of ``$CXX``, ``g++`` and ``clang++`` that is installed."""
    names = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    return next((name for name in names if shutil.which(name)), None)


def build(folder: Path, instructions: str) -> Path:
    """Compile the library for one of ``FLAGS`` into ``folder``, which is created; returns its path.

    The file name holds the digest of the sources and that of the file, so that a damaged file is noticed when
    it is loaded. Raises ``FileNotFoundError`` without a compiler, and ``RuntimeError`` with the compiler's
    message.
    """
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler: neither $CXX nor g++ nor clang++")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as made:
        place = Path(made)
        for name in FILES:  # under the same names everywhere, so that the bytes are the same
            shutil.copyfile(SOURCES / name, place / name)
        command = [compiler, *FLAGS[instructions], "library.cpp", "-o", "library.so", "-ldl"]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        found = place / "library.so"
        digest = hashlib.sha256(found.read_bytes()).hexdigest()
        target = folder / f"{sources_digest(instructions)}-{digest}.so"
        found.chmod(0o644)
        found.replace(target)
    return target


def chosen_sets(choice: str, own_only: bool = False) -> tuple[str, ...]:
    """The instruction sets that ``choice`` (see ``CHOICE``) means. ``own``: the best that this CPU has and,
    unless ``own_only``, the one that all of its kind have, so that the installation may be copied.

    >>> chosen_sets("off"), chosen_sets("avx2 avx512")
    ((), ('avx2', 'avx512'))
    """
    sets = MACHINES.get(platform.machine(), ()) if platform.system() == "Linux" else ()
    if choice not in ("", "own", "all"):
        return () if choice.lower() in ("off", "0", "no") else tuple(choice.split())
    if choice == "all":
        return sets
    own = next((name for name in sets if _is_on_cpu(name)), None)
    return tuple(dict.fromkeys([own, *([] if own_only else sets[-1:])])) if own else ()


def _is_on_cpu(instructions: str) -> bool:
    """Whether Linux lists what ``NEEDED`` says: ``avx512f`` for ``avx512_f``, ``fma`` for ``fma3``."""
    text = _CPUINFO.read_text(encoding="utf-8", errors="replace") if _CPUINFO.exists() else ""
    has = set(text.replace("_", "").split())
    words = (name.replace("_", "").replace("fma3", "fma") for name in NEEDED[instructions])
    return all(word in has for word in words)


def build_all(folder: Path, sets: Iterable[str]) -> list[Path]:
    """Leave the libraries for ``sets`` in ``folder`` and no other; those that are there already stay.

    Raises what ``build`` raises.
    """
    wanted = {name: sources_digest(name) for name in sets}
    for path in folder.glob("*.so"):
        if path.stem.partition("-")[0] not in wanted.values() or not is_whole(path):
            path.unlink()
    missing = [name for name, digest in wanted.items() if not [*folder.glob(f"{digest}-*.so")]]
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        list(compilers.map(lambda name: build(folder, name), missing))
    return sorted(folder.glob("*.so"))


def is_whole(path: Path) -> bool:
    """Whether a library file has the digest that its name states."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return path.stem.partition("-")[2] == digest


def _main() -> None:
    machine = platform.machine()
    parser = argparse.ArgumentParser(description="Compile the library of kernels.")
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("names", nargs="*", metavar="instructions", help=", ".join(FLAGS))
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in FLAGS]
    if unknown:
        parser.error(f"no library is built for {', '.join(unknown)}; there are {', '.join(FLAGS)}")
    if not given.names and machine not in MACHINES:
        known = ", ".join(MACHINES)
        parser.error(f"there are no kernels for {machine}, only for {known}: name the instructions")
    for name in given.names or MACHINES[machine]:
        sys.stdout.write(f"{build(given.folder, name)}\n")


if __name__ == "__main__":
    _main()
