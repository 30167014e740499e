"""The package ``backquant-kernels`` (``kernels/``): found where it is installed, or refused in words."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from backquant.native import library
from backquant.native.build import FLAGS, MACHINES, sources_digest
from backquant.native.instructions import usable
from backquant.version import __version__

ROOT = Path(__file__).resolve().parents[2]
SAYS = "from backquant.native.library import _held, missing; print(missing() or _held[0]._name)"


@pytest.fixture(scope="module")
def backend() -> ModuleType:
    spec = importlib.util.spec_from_file_location("backend", ROOT / "kernels" / "backend.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def installed(
    backend: ModuleType, built_kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder into which pip has installed the wheel of the library that is built already."""
    built = next(built_kernels.glob(f"{sources_digest(usable()[0].name)}-*.so"))
    monkeypatch.setattr(backend, "_compiled", lambda folder: [Path(shutil.copy(built, folder))])
    wheel = tmp_path / backend.build_wheel(str(tmp_path))
    again = tmp_path / "again"
    again.mkdir()
    backend.build_wheel(str(again))
    assert (again / wheel.name).read_bytes() == wheel.read_bytes()
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, capture_output=True)
    return target


def said(site: Path, nowhere: Path) -> str:
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(nowhere), "PATH": ""}
    environment.pop(library.VARIABLE, None)
    command = [sys.executable, "-W", "ignore", "-c", SAYS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.usefixtures("native_library")
def test_models_run_on_the_library_that_is_installed(installed: Path, tmp_path: Path) -> None:
    assert said(installed, tmp_path).startswith(str(installed / "backquant_kernels"))


@pytest.mark.usefixtures("native_library")
def test_one_that_was_damaged_after_its_installation_is_not_used(
    installed: Path, tmp_path: Path
) -> None:
    with next(installed.rglob("*.so")).open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"x")
    assert "is damaged" in said(installed, tmp_path)


def test_the_sdist_has_the_sources_of_the_library(backend: ModuleType, tmp_path: Path) -> None:
    archive = tmp_path / backend.build_sdist(str(tmp_path))
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    place = tmp_path / archive.name.removesuffix(".tar.gz")
    code = "import sys; sys.path.insert(0, 'native'); import build, backend; "
    code += "print(*map(build.sources_digest, build.FLAGS), backend.version())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == [*map(sources_digest, FLAGS), __version__]


def test_without_a_compiler_pip_says_what_is_missing(backend: ModuleType, tmp_path: Path) -> None:
    archive = tmp_path / backend.build_sdist(str(tmp_path))
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "PYTHONPATH")}
    environment["PATH"] = str(tmp_path)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target"]
    done = subprocess.run(
        [*pip, str(tmp_path / "site"), str(archive)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert "there is no C++ compiler" in done.stdout + done.stderr
    assert "backquant runs without it" in done.stdout + done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_what_the_wheel_says_of_itself(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "0-1.so"
    made.write_bytes(b"library")
    monkeypatch.setattr(backend, "_compiled", lambda folder: [made])
    with zipfile.ZipFile(tmp_path / backend.build_wheel(str(tmp_path))) as wheel:
        text = wheel.read(f"backquant_kernels-{__version__}.dist-info/METADATA").decode()
    assert f"Name: backquant-kernels\nVersion: {__version__}\n" in text


@pytest.mark.parametrize(
    ("machine", "names"),
    [
        ("x86_64", ["amx", "avx512_vnni", "avx_vnni", "avx512", "avx2"]),
        ("aarch64", ["neon_i8mm", "neon_dot", "neon"]),
    ],
)
def test_a_wheel_is_of_its_machine(
    backend: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    names: list[str],
) -> None:
    asked: list[str] = []

    def build(folder: Path, instructions: str) -> Path:
        asked.append(instructions)
        (folder / f"{instructions}.so").write_bytes(b"library")
        return folder / f"{instructions}.so"

    monkeypatch.setattr("platform.machine", lambda: machine)
    builder = SimpleNamespace(build=build, MACHINES=MACHINES)
    monkeypatch.setattr(backend, "_builder", lambda: builder)
    wheel = backend.build_wheel(str(tmp_path))
    assert wheel.endswith(f"-py3-none-linux_{machine}.whl")
    assert asked == names


def test_there_is_none_for_other_machines(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(SystemExit, match="backquant runs without it"):
        backend.build_wheel(str(tmp_path))


def test_the_extra_asks_for_the_library_of_this_version() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nkernels = ["backquant-kernels=={__version__}"]' in project
