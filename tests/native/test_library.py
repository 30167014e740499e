"""The library of kernels in processes of its own: found, verified, refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from backquant.errors import EngineError
from backquant.native import library
from backquant.native.build import FILES, _main, build, is_whole, sources_digest
from backquant.native.instructions import usable

NONE_INSTALLED = """
from pathlib import Path
from backquant.native import library
library.INSTALLED = Path("nowhere")
"""
SAYS = f"{NONE_INSTALLED}print(library.missing() or 'runs')"
pytestmark = pytest.mark.usefixtures("native_library")


@pytest.fixture
def whole(built_kernels: Path) -> Path:
    """The library for this CPU."""
    return next(built_kernels.glob(f"{sources_digest(usable()[0].name)}-*.so"))


def said(folder: Path | str, **variables: str) -> str:
    environment = {**os.environ, library.VARIABLE: str(folder), **variables}
    command = [sys.executable, "-W", "ignore", "-c", SAYS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_runs_from_the_folder_that_the_variable_names(built_kernels: Path) -> None:
    assert said(built_kernels) == "runs"


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({library.VARIABLE: "off"}, "BACKQUANT_KERNELS is off"),
        ({"ONEDNN_MAX_CPU_ISA": "SSE41"}, "ONEDNN_MAX_CPU_ISA is SSE41"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX"}, "ONEDNN_MAX_CPU_ISA is AVX"),
        ({"ONEDNN_MAX_CPU_ISA": "ALL"}, "runs"),
    ],
)
def test_the_environment_switches_it_off(
    built_kernels: Path, variables: dict[str, str], reason: str
) -> None:
    assert said(**{"folder": built_kernels, **variables}) == reason


def test_without_one_models_are_told_how_to_get_it(tmp_path: Path) -> None:
    told = said(tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert told == "the library is not installed; it needs g++"


def test_a_damaged_library_is_not_loaded(whole: Path, tmp_path: Path) -> None:
    assert is_whole(whole)
    damaged = tmp_path / whole.name
    shutil.copyfile(whole, damaged)
    with damaged.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"x")
    assert "is damaged" in said(tmp_path, XDG_CACHE_HOME=str(tmp_path))


def test_one_of_other_sources_is_not_looked_at(whole: Path, tmp_path: Path) -> None:
    shutil.copyfile(whole, tmp_path / f"{'0' * 16}{whole.name[16:]}")
    assert said(tmp_path, XDG_CACHE_HOME=str(tmp_path)).startswith("the library is not installed")


def test_the_same_bytes_twice(built_kernels: Path, tmp_path: Path) -> None:
    """Its name holds the digest of its bytes."""
    best = usable()[0].name
    known = {path.name for path in built_kernels.glob(f"{sources_digest(best)}-*.so")}
    assert build(tmp_path / "again", best).name in known


def test_kernels_that_compute_wrongly_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_found", [])
    monkeypatch.setattr("backquant.native.library._X", (0.02, 118))
    monkeypatch.setattr("backquant.native.library._finished", lambda value, result: value + 1)
    assert "is wrong on this CPU" in library.missing()


def test_without_a_compiler_building_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(EngineError, match="no C\\+\\+ compiler") as raised:
        library.build_kernels()
    assert "g++" in str(raised.value)


def test_the_sources_are_in_the_package() -> None:
    folder = Path(library.__file__).parent
    assert [name for name in FILES if not (folder / name).is_file()] == []


@pytest.mark.parametrize(
    ("machine", "arguments", "said"),
    [
        ("riscv64", ["folder"], "no kernels for riscv64, only for x86_64, aarch64"),
        ("x86_64", ["folder", "avx3"], "no library is built for avx3"),
        ("x86_64", [], "required: folder"),
    ],
)
def test_the_command_says_what_it_does_not_build(
    machine: str,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(sys, "argv", ["build", *arguments])
    with pytest.raises(SystemExit):
        _main()
    assert said in capsys.readouterr().err


QUANTIZES = f"""
{NONE_INSTALLED}
import torch, backquant
from torch import nn
x = torch.zeros(2, 8)
q = backquant.quantize(nn.Sequential(nn.Linear(8, 8)).eval(), (x,), calibration=[x])
backquant.save(q, "m.bq")
assert backquant.load("m.bq").report.library == q.report.library
print(q.report)
"""


def test_a_report_says_how_the_model_would_run_faster(tmp_path: Path, built_kernels: Path) -> None:
    def reported(kernels: str) -> str:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), library.VARIABLE: kernels}
        command = [sys.executable, "-W", "ignore", "-c", QUANTIZES]
        run = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
        return run.stdout

    assert "build_kernels" not in reported("off")
    assert "next      backquant.native.build_kernels()" in reported("")
    assert "backquant.linear" in reported(str(built_kernels))
