"""The command ``migrate``: what it writes, prints, and returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from backquant.cli.app import app

OLD = "from torch.ao.quantization import QConfig\n"
NEW = "from backquant.ao.quantization import QConfig\n"
SCRIPTED = "import torch.ao.quantization as tq\ntq.quantize_jit(model)\n"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["migrate", *map(str, arguments)])


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/a.py").write_text(OLD, encoding="utf-8")
    (tmp_path / "pkg/b.py").write_text("x = 1\n", encoding="utf-8")
    return tmp_path


def test_it_writes_and_is_done(project: Path) -> None:
    result = run(project)
    assert result.exit_code == 0, result.output
    assert (project / "pkg/a.py").read_text(encoding="utf-8") == NEW
    assert result.stdout.splitlines() == [
        f"rewritten      {project}/pkg/a.py",
        "",
        "2 files, 1 rewritten",
    ]
    again = run(project)
    assert (again.exit_code, again.stdout) == (0, "2 files, nothing to do\n")


def test_what_needs_a_person_is_status_1(project: Path) -> None:
    (project / "train.py").write_text(SCRIPTED, encoding="utf-8")
    result = run(project)
    assert result.exit_code == 1
    assert (project / "train.py").read_text(encoding="utf-8") == SCRIPTED
    assert (project / "pkg/a.py").read_text(encoding="utf-8") == NEW
    assert f"{project}/train.py:2  torch.ao.quantization.quantize_jit" in result.stdout
    assert result.stdout.endswith(
        "3 files, 1 rewritten, 1 left as they are, 1 place for a person\n"
    )


def test_check_writes_nothing(project: Path) -> None:
    result = run(project, "--check")
    assert result.exit_code == 1
    assert (project / "pkg/a.py").read_text(encoding="utf-8") == OLD
    assert "would change" in result.stdout
    run(project)
    assert run(project, "--check").exit_code == 0


def test_check_fails_for_what_needs_a_person_alone(project: Path) -> None:
    (project / "pkg/a.py").write_text(SCRIPTED, encoding="utf-8")
    assert run(project, "--check").exit_code == 1


def test_the_diff_is_a_patch(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    text = OLD + "\n\ndef f():\n    return QConfig\n"
    (project / "pkg/a.py").write_text(text, encoding="utf-8")
    result = run("pkg", "--diff")
    assert result.exit_code == 1
    assert (project / "pkg/a.py").read_text(encoding="utf-8") == text
    assert "would change" in result.stderr
    assert result.stdout == (
        "--- a/pkg/a.py\n+++ b/pkg/a.py\n@@ -1,4 +1,4 @@\n"
        f"-{OLD}+{NEW}"
        " \n \n def f():\n"  # empty lines of context keep the space that a patch needs
    )


def test_data(project: Path) -> None:
    (project / "train.py").write_text(SCRIPTED, encoding="utf-8")
    result = run(project, "--json", "--diff")
    data = json.loads(result.stdout)
    assert result.exit_code == 1
    assert data["counts"] == {
        "files": 3,
        "changed": 1,
        "written": 0,
        "held": 1,
        "needs_person": 1,
    }
    assert data["needs_person"][0]["path"] == f"{project}/train.py"
    assert f"+{NEW}" in data["diff"]
    assert json.loads(run(project, "--json").stdout)["counts"]["written"] == 1


def test_exclude(project: Path) -> None:
    result = run(project, "--check", "--exclude", "pkg/a.py", "--exclude", "*.pyi")
    assert (result.exit_code, result.stdout) == (0, "1 file, nothing to do\n")


def test_bad_usage(project: Path) -> None:
    missing = run(project / "no")
    assert missing.exit_code == 2
    assert "does not exist" in missing.stderr
    assert json.loads(run(project / "no", "--json").stdout)["error"]["kind"] == "UsageError"
    assert run().exit_code == 2
    assert run(project, "--chek").exit_code == 2
