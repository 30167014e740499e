from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from backquant.backend_config import list_backends

TOOL = Path(__file__).resolve().parents[2] / "tools" / "generate_backend_docs.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("generate_backend_docs", TOOL)
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


@pytest.fixture
def elsewhere(tool, tmp_path, monkeypatch):
    """Generate into an empty folder; backends are found in the real one."""
    monkeypatch.setattr(tool, "_module_file", lambda name: TOOL)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (tmp_path / "src/backquant/backend_config/files").mkdir(parents=True)
    return tmp_path


def test_committed_files_are_current(tool, capsys):
    assert tool.main(["--check"]) == 0, capsys.readouterr().out


def test_every_backend_has_a_section(tool):
    page = tool.backends_page()
    for name in list_backends():
        assert f"\n## {name}\n" in page
        assert f"(#{name})" in page


def test_check_finds_what_is_missing_and_stale_and_writes_nothing(tool, elsewhere, capsys):
    assert tool.main(["--check"]) == 1
    assert "docs/backends.md is missing" in capsys.readouterr().out
    assert not (elsewhere / "docs").exists()
    assert tool.main([]) == 0
    assert tool.main(["--check"]) == 0
    page = elsewhere / "docs" / "backends.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("# Backends", "# Back ends", 1), encoding="utf-8")
    capsys.readouterr()
    assert tool.main(["--check"]) == 1
    output = capsys.readouterr().out
    assert "docs/backends.md:1 is stale:\n  - # Back ends\n  + # Backends\n" in output
    assert tool.COMMAND in output
    page.write_text(text + "more\n", encoding="utf-8")
    assert tool.main(["--check"]) == 1


def test_unknown_arguments(tool, capsys):
    assert tool.main(["--chekc"]) == 2
    assert "Usage" in capsys.readouterr().err
