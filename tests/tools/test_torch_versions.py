"""The table of versions, and what the package declares, are those that were run."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "torch_versions.py"
# Where Python has no reader of TOML, pytest depends on the package that it was made from.
_TOML = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torch_versions", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_the_results(tool: ModuleType) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(tool.rows())


def test_what_is_declared_was_run(tool: ModuleType) -> None:
    project = _TOML.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons, torches = tool.series(tool.rows(), "python"), tool.series(tool.rows(), "torch")
    assert project["requires-python"] == tool.declared(pythons)
    listed = [re.findall(r":: (3\.\d+)$", line) for line in project["classifiers"]]
    assert [version for found in listed for version in found] == pythons
    assert f"torch{tool.declared(torches)}" in project["dependencies"]


def test_files_that_need_what_is_not_there_are_named(tool: ModuleType) -> None:
    left = tool.left_out(["torch.ao.quantization"], ["tests/observe", "tests/lower"])
    files = left["torch.ao.quantization"]
    assert "tests/observe/test_qparams.py" in files  # imports it
    assert "tests/lower/test_against_torch.py" in files
    assert "tests/lower/test_chain.py" not in files
    assert tool.left_out([], ["tests/observe"]) == {}


def test_what_an_environment_lacks(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_files" / "inner").mkdir(parents=True)
    (tmp_path / "of_files" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "namespace" / "inner").mkdir(parents=True)  # as executorch: no __init__.py
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    have = ("of_files", "of_files.inner", "namespace", "namespace.inner")
    lack = ("of_files.other", "namespace.other", "other")
    monkeypatch.setattr(tool, "OPTIONAL", dict.fromkeys([*have, *lack], ()))
    assert tool.lacking(Path(sys.executable)) == list(lack)


def test_what_pytest_says_last(tool: ModuleType) -> None:
    log = "FAILED tests/a.py::b[x] - no\nERROR tests/c.py - also\n== 1 failed, 20 passed, 1 error in 3.21s =="
    counted = {"passed": 20, "failed": ["tests/a.py::b[x]", "tests/c.py"]}
    assert tool.counted(log) == counted
    with pytest.raises(SystemExit, match="did not come to its end"):
        tool.counted("collected 3 items")
