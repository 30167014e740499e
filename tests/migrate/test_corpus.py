"""Whole files as users write them, PyTorch's documented flows among them: migrated, and run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backquant.migrate import migrate_source

CORPUS = Path(__file__).parent / "corpus"
NAMES = sorted(path.stem for path in (CORPUS / "before").glob("*.py"))
FLOWS = ["fx_static", "fx_dynamic", "fx_qat", "backend_config"]
WRITE = bool(os.environ.get("BACKQUANT_WRITE_MESSAGES"))


def expected(path: Path, actual: str) -> str:
    """The text of a file; with ``BACKQUANT_WRITE_MESSAGES=1`` it is written first."""
    if WRITE:
        path.write_text(actual, encoding="utf-8") if actual else path.unlink(missing_ok=True)
    return path.read_text(encoding="utf-8") if path.exists() else ""


@pytest.mark.parametrize("name", NAMES)
def test_what_a_file_becomes(name: str) -> None:
    before = (CORPUS / "before" / f"{name}.py").read_text(encoding="utf-8")
    result = migrate_source(before, f"{name}.py")
    assert result.after == expected(CORPUS / "after" / f"{name}.py", result.after)
    findings = "".join(f"{finding}\n" for finding in result.findings)
    assert findings == expected(CORPUS / "needs_person" / f"{name}.txt", findings)


def test_nothing_else_lies_in_the_corpus() -> None:
    after = sorted(path.stem for path in (CORPUS / "after").iterdir())
    assert after == NAMES
    assert {path.stem for path in (CORPUS / "needs_person").iterdir()} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_migrating_twice_changes_nothing(name: str) -> None:
    after = (CORPUS / "after" / f"{name}.py").read_text(encoding="utf-8")
    again = migrate_source(after, f"{name}.py")
    assert again.after == after


@pytest.mark.parametrize("name", NAMES)
def test_lines_that_name_nothing_of_pytorch_stay(name: str) -> None:
    """Comments and layout survive: every line without a name to migrate is there, in its order."""
    before = (CORPUS / "before" / f"{name}.py").read_text(encoding="utf-8").splitlines()
    after = (CORPUS / "after" / f"{name}.py").read_text(encoding="utf-8").splitlines()
    comments = [line.strip() for line in before if line.strip().startswith("#")]
    assert [line.strip() for line in after if line.strip().startswith("#")] == comments


@pytest.mark.parametrize("name", FLOWS)
def test_documented_flows_need_nobody_and_run(name: str, tmp_path: Path) -> None:
    before = (CORPUS / "before" / f"{name}.py").read_text(encoding="utf-8")
    result = migrate_source(before, f"{name}.py")
    assert result.findings == ()
    script = tmp_path / f"{name}.py"
    # torch.ao must not be what runs: importing it by its name fails
    script.write_text(GUARD + result.after.replace("from __future__", "# "), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, sys.path)),
            "OMP_NUM_THREADS": "1",
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() != ""


#: Before the script: the functions of the flow in torch.ao fail when they are called.
GUARD = """\
import torch.ao.quantization.quantize_fx as _flow

def _refused(*_args, **_keywords):
    raise AssertionError("torch.ao was called")

for _name in ("prepare_fx", "prepare_qat_fx", "convert_fx", "_prepare_fx", "_convert_fx"):
    setattr(_flow, _name, _refused)

"""
