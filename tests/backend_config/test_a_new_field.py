"""A new field of the language is one declaration: a line in a copy of the sources, and all forms have it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import backquant

DECLARATION = """\
    accumulator_bits: Annotated[
        int | None, OURS, "Bits of the sums that the hardware keeps.", Phrase("sums of {} bits")
    ] = None
"""
SCRIPT = """
import pickle
import torch
from backquant import interop
from backquant.backend_config import (
    BackendConfig, BackendPatternConfig, DTypeConfig, json_schema, files
)
from backquant.backend_config.describe import describe_dtype_config
from backquant.errors import SpecError

def backend(config):
    entry = BackendPatternConfig(torch.nn.Linear).add_dtype_config(config)
    return BackendConfig("mine").set_backend_pattern_config(entry)

config = DTypeConfig(torch.qint8, torch.qint8, accumulator_bits=24)
mine, plain = backend(config), backend(DTypeConfig(torch.qint8, torch.qint8))
assert mine != plain
assert repr(config).endswith("accumulator_bits=24)")
assert describe_dtype_config(config) == "qint8 → qint8, sums of 24 bits"
assert BackendConfig.from_dict(mine.to_dict()) == mine
assert pickle.loads(pickle.dumps(mine)) == mine
for form in ("yaml", "json"):
    assert files.loads(files.dumps(mine, form), form) == mine
assert "dtype_configs[qint8 → qint8].accumulator_bits: 24" in plain.diff(mine).render()
described = json_schema()["$defs"]["DTypeConfig"]["properties"]["accumulator_bits"]
assert described["description"] == "Bits of the sums that the hardware keeps."
text = files.dumps(mine).replace("accumulator_bits: 24", "accumulator_bits: many")
try:
    files.loads(text, file="mine.yaml")
except SpecError as error:
    line = 1 + text[: text.index("accumulator_bits")].count(chr(10))
    assert f"mine.yaml:{line}: dtype_configs.qint8.accumulator_bits" in str(error), error
else:
    raise AssertionError("a word is no number of bits")
try:
    interop.to_torch_ao(mine)
except SpecError as error:
    assert 'without=("accumulator_bits",)' in error.fix
else:
    raise AssertionError("PyTorch has no such field")
assert interop.from_torch_ao(interop.to_torch_ao(mine, without=("accumulator_bits",))) == plain
"""


def test_one_line_declares_a_field(tmp_path: Path) -> None:
    copied = tmp_path / "backquant"
    package = Path(backquant.__file__).parent
    shutil.copytree(package, copied, ignore=shutil.ignore_patterns("__pycache__"))
    path = copied / "backend_config" / "dtypes.py"
    source = path.read_text(encoding="utf-8")
    before = "    input_dtype_with_constraints: DTypeWithConstraints = field(init=False)\n"
    assert source.count(before) == 1
    path.write_text(source.replace(before, DECLARATION + before), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
