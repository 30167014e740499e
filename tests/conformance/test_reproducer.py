"""The scripts of findings stand alone: they repeat what they were written for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import backquant
from backquant.backend_config import BackendConfig

VENDOR = """schema_version: 1
name: vendor
entries:
- pattern: operator.floordiv
  dtype_configs: [{input_dtype: quint8, output_dtype: quint8}]
"""


def test_a_description_that_nobody_knows_lies_beside_its_scripts(tmp_path: Path) -> None:
    """With the engine as it was asked for; scripts of an earlier run in the folder are gone."""
    (tmp_path / "given.yaml").write_text(VENDOR, encoding="utf-8")
    scripts = tmp_path / "out" / "findings"
    scripts.mkdir(parents=True)
    (scripts / "007.py").write_text("of another run", encoding="utf-8")
    found = backquant.conform(
        BackendConfig.load(tmp_path / "given.yaml"),
        engine="x86",
        rounds=1,
        jobs=0,
        output=tmp_path / "out",
    )
    assert not found.conforms
    assert sorted(path.name for path in scripts.iterdir()) == ["001.py", "vendor.yaml"]
    text = (scripts / "001.py").read_text(encoding="utf-8")
    assert text.count("\n") <= 30 and "'x86'" in text
    run = subprocess.run(
        [sys.executable, scripts / "001.py"], capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith("not integer: ") and run.stdout.count("\n") == 1
