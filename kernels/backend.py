"""Builds the package ``backquant-kernels``: a wheel with the library, and an sdist that builds it elsewhere.

    python kernels/backend.py dist

A build backend as Python's packaging defines it (PEP 517), on the standard library alone: the library is one
call of a compiler for each set of instructions, and what PyTorch has is looked up when it is loaded. The
sources are those of the checkout (``src/backquant/native``), or in an sdist its own copy.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import os
import platform
import re
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
NAME, MODULE = "backquant-kernels", "backquant_kernels"
_COPIES = HERE / "native"  # of an sdist
_INIT = '"""The library of kernels that backquant looks for here; nothing to import."""\n'
_EARLIEST = 315532800  # of a zip file: 1980


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """Compile the library and pack it; the wheel's name. Raises ``SystemExit`` where that cannot be."""
    del config_settings, metadata_directory
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in _builder().MACHINES:
        raise SystemExit(f"{NAME} is for Linux on x86-64 and ARM; backquant runs without it")
    with tempfile.TemporaryDirectory() as made:
        files = {f"{MODULE}/__init__.py": _INIT.encode()}
        for library in _compiled(Path(made)):
            files[f"{MODULE}/{library.name}"] = library.read_bytes()
    tag = f"py3-none-linux_{machine}"
    info = f"{MODULE}-{version()}.dist-info"
    files[f"{info}/METADATA"] = _metadata().encode()
    text = f"Wheel-Version: 1.0\nGenerator: {NAME}\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files[f"{info}/WHEEL"] = text.encode()
    files[f"{info}/licenses/LICENSE"] = _license().read_bytes()
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    name = f"{MODULE}-{version()}-{tag}.whl"
    with zipfile.ZipFile(Path(wheel_directory) / name, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path, time.gmtime(_date())[:6])
            entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            wheel.writestr(entry, content)
    return name


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Pack the sources; the archive's name."""
    del config_settings
    native = _native()
    files = {name: (HERE / name).read_bytes() for name in ("pyproject.toml", "backend.py")}
    files["README.md"] = (HERE / "README.md").read_bytes()
    files["LICENSE"] = _license().read_bytes()
    files["PKG-INFO"] = _metadata().encode()
    files["native/version.py"] = _version_file().read_bytes()
    for name in ("build.py", *_builder().FILES):
        files[f"native/{name}"] = (native / name).read_bytes()
    base = f"{MODULE}-{version()}"
    with tarfile.open(Path(sdist_directory) / f"{base}.tar.gz", "w:gz") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(f"{base}/{path}")
            entry.size, entry.mtime = len(content), _date()
            archive.addfile(entry, io.BytesIO(content))
    return f"{base}.tar.gz"


def version() -> str:
    """backquant's own."""
    found = re.search(r'__version__ = "([^"]+)"', _version_file().read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def _compiled(folder: Path) -> list[Path]:
    """The library for each set of instructions, as a wheel does not know its CPU; a compiler that is too old
    for one of them leaves that out, and says so."""
    builder, built, error = _builder(), [], None
    for instructions in builder.MACHINES[platform.machine()]:
        try:
            built.append(builder.build(folder, instructions))
        except (FileNotFoundError, RuntimeError) as raised:
            error = raised
            print(f"{NAME} without {instructions}: {raised}", file=sys.stderr)
    if built:
        return built
    fix = "install one (apt-get install g++), or leave the package out: backquant runs without it"
    raise SystemExit(f"{NAME} cannot be built: {error}\n{fix}") from error


def _builder() -> ModuleType:
    """``backquant.native.build``, without what importing backquant needs."""
    spec = importlib.util.spec_from_file_location(f"{MODULE}_build", _native() / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _native() -> Path:
    return _COPIES if _COPIES.is_dir() else HERE.parent / "src" / "backquant" / "native"


def _version_file() -> Path:
    return (_COPIES if _COPIES.is_dir() else _native().parent) / "version.py"


def _license() -> Path:
    return (HERE if _COPIES.is_dir() else HERE.parent) / "LICENSE"


def _metadata() -> str:
    return (
        f"Metadata-Version: 2.4\nName: {NAME}\nVersion: {version()}\n"
        "Summary: Kernels of backquant for CPUs with AVX2, AVX-VNNI, AVX-512 or NEON, built once.\n"
        "License-Expression: BSD-3-Clause\nLicense-File: LICENSE\nRequires-Python: >=3.10\n"
    )


def _record(files: dict[str, bytes], own: str) -> bytes:
    rows = []
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(content)}\n")
    return "".join([*rows, f"{own},,\n"]).encode()


def _date() -> int:
    return max(_EARLIEST, int(os.environ.get("SOURCE_DATE_EPOCH", _EARLIEST)))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for build in (build_sdist, build_wheel):
        print(target / build(str(target)))
