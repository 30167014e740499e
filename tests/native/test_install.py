"""Installing from source: the library of kernels comes with the package, and its absence never stops pip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from backquant.native import build
from backquant.native.build import NEEDED, chosen_sets, sources_digest
from backquant.native.instructions import INSTRUCTION_SETS, usable

ROOT = Path(__file__).resolve().parents[2]
NATIVE = "src/backquant/native"
PACKAGE = (
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    f"{NATIVE}",
    "src/backquant/version.py",
)
#: As pip builds: in an environment of its own, where there is neither PyTorch nor numpy.
BUILD = """
import sys
sys.modules.update(dict.fromkeys(("torch", "numpy", "backquant")))
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])("out"))
"""
#: A compiler that gives what ``$PREBUILT`` names, in a moment.
COMPILER = '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp "$PREBUILT" "$2"\n'
SAYS = "from backquant.native import library; print(library.missing() or library.held()._name)"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What setup.py reads of the package: its kernels."""
    place = tmp_path / "checkout"
    for name in PACKAGE:
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            left_out = shutil.ignore_patterns("libraries", "__pycache__")
            shutil.copytree(ROOT / name, target, ignore=left_out)
        else:
            shutil.copyfile(ROOT / name, target)
    (place / "src" / "backquant" / "__init__.py").touch()
    (place / "out").mkdir()
    return place


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    path = tmp_path / "compiler"
    path.write_text(COMPILER, encoding="utf-8")
    path.chmod(0o755)
    return path


def made(checkout: Path, hook: str, **variables: str) -> tuple[Path, str]:
    """What a hook of the build backend writes, and what it says."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000", **variables}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD, hook],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return checkout / "out" / done.stdout.splitlines()[-1], done.stderr


def libraries(wheel: Path) -> list[str]:
    return [name for name in ZipFile(wheel).namelist() if name.endswith(".so")]


def test_a_wheel_with_the_library_is_for_a_machine_and_any_python(
    checkout: Path, compiler: Path, tmp_path: Path
) -> None:
    prebuilt = tmp_path / "prebuilt"
    prebuilt.write_bytes(b"library")
    wheel, _ = made(
        checkout,
        "build_wheel",
        CXX=str(compiler),
        PREBUILT=str(prebuilt),
        BACKQUANT_BUILD_KERNELS="avx2 neon",
    )
    assert "-py3-none-linux_" in wheel.name
    names = libraries(wheel)
    assert all(name.startswith("backquant/native/libraries/") for name in names)
    stems = {Path(name).name.partition("-")[0] for name in names}
    assert stems == {sources_digest("avx2"), sources_digest("neon")}
    info = next(n for n in ZipFile(wheel).namelist() if n.endswith("/WHEEL"))
    assert "Root-Is-Purelib: false" in ZipFile(wheel).read(info).decode()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"CXX": "", "PATH": "/nowhere"}, "there is no C++ compiler"),
        ({"CXX": "false"}, "warning: installed without the library of kernels"),
        ({"BACKQUANT_BUILD_KERNELS": "off"}, "library of kernels: none"),
        ({"BACKQUANT_BUILD_KERNELS": "avx3"}, "avx3"),
    ],
)
def test_what_cannot_be_compiled_is_left_out(
    checkout: Path, variables: dict[str, str], words: str
) -> None:
    chosen = {"BACKQUANT_BUILD_KERNELS": "avx2", **variables}
    wheel, told = made(checkout, "build_wheel", **chosen)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert libraries(wheel) == []
    assert words in told


def test_an_editable_install_compiles_into_the_checkout(
    checkout: Path, compiler: Path, tmp_path: Path
) -> None:
    prebuilt = tmp_path / "prebuilt"
    prebuilt.write_bytes(b"library")
    told = {"CXX": str(compiler), "PREBUILT": str(prebuilt), "BACKQUANT_BUILD_KERNELS": "avx2"}
    stale = checkout / NATIVE / "libraries" / f"{'0' * 16}-1.so"
    stale.parent.mkdir()
    stale.touch()
    made(checkout, "build_editable", **told)
    (path,) = stale.parent.iterdir()
    assert path.name.startswith(sources_digest("avx2"))
    made(
        checkout, "build_editable", **{**told, "CXX": "false"}
    )  # the second time there is nothing to do
    assert [path] == list(stale.parent.iterdir())


def test_an_sdist_has_what_the_library_is_compiled_from(checkout: Path) -> None:
    archive, _ = made(checkout, "build_sdist", CXX="false")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {"setup.py", f"{NATIVE}/build.py", *(f"{NATIVE}/{n}" for n in build.FILES)} <= names


@pytest.mark.usefixtures("native_library")
def test_models_run_on_the_library_that_was_installed(
    checkout: Path, compiler: Path, built_kernels: Path, tmp_path: Path
) -> None:
    own = usable()[0].name
    prebuilt = next(built_kernels.glob(f"{sources_digest(own)}-*.so"))
    wheel, _ = made(
        checkout,
        "build_wheel",
        CXX=str(compiler),
        PREBUILT=str(prebuilt),
        BACKQUANT_BUILD_KERNELS=own,
    )
    site = tmp_path / "site"
    shutil.copytree(ROOT / "src" / "backquant", site / "backquant")
    shutil.rmtree(site / "backquant" / "native")
    ZipFile(wheel).extractall(tmp_path / "wheel")
    shutil.copytree(tmp_path / "wheel/backquant/native", site / "backquant" / "native")
    environment = {**os.environ, "PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path)}
    del environment["BACKQUANT_KERNELS"]
    command = [sys.executable, "-W", "ignore", "-c", SAYS]

    def told() -> str:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert told().startswith(str(site / "backquant" / "native" / "libraries"))
    with next(site.rglob("*.so")).open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"x")
    assert "is damaged" in told()


CPUINFO = {
    "fpu avx avx2 fma": "avx2",
    "avx2 fma avx_vnni": "avx_vnni",
    "avx2 fma avx512f avx512bw avx512vl avx512dq": "avx512",
    "avx2 fma avx512f avx512bw avx512vl avx512dq avx512_vnni": "avx512_vnni",
    "avx2 fma avx512f avx512bw avx512vl avx512dq avx512_vnni amx_int8 amx_tile": "amx",
}


@pytest.mark.parametrize(("flags", "best"), CPUINFO.items())
def test_the_best_set_of_this_cpu_and_the_one_that_all_have(
    flags: str, best: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"flags\t\t: {flags} sse\n", encoding="utf-8")
    monkeypatch.setattr(build, "_CPUINFO", info)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert chosen_sets("") == tuple(dict.fromkeys([best, "avx2"]))
    assert chosen_sets("", own_only=True) == (best,)
    assert chosen_sets("all") == build.MACHINES["x86_64"]


def test_none_for_other_machines_and_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert chosen_sets("") == chosen_sets("all") == ()
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert chosen_sets("") == ()


def test_the_cpu_here_is_read_alike_with_torch_and_without() -> None:
    sets = {found.name for found in usable(limit="")}
    assert set(chosen_sets("", own_only=True)) <= sets | {"amx"}
    assert set(NEEDED) == {known.name for known in INSTRUCTION_SETS}
