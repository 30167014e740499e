"""Operators that run as one kernel, by their names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backquant
import snapshots
from backquant.errors import SpecError
from backquant.nn.quantized import reference
from backquant.operators.described import fused_entries

SPEC = """
schema_version: 1
name: fused
dtype_configs:
  int8: {input_dtype: qint8, output_dtype: qint8, weight_dtype: qint8}
entries:
- operators: [conv2d, conv2d+relu6, conv2d+batch_norm2d, linear, linear+relu]
  dtype_configs: [int8]
  where: {rank: {max: 4}}
"""


def test_other_operators_stay_nodes_of_the_pattern() -> None:
    by_pattern = {entry.pattern: entry for entry in fused_entries("conv2d+hardswish")}
    entry = by_pattern[nn.Conv2d, nn.Hardswish]
    assert (entry.root_module, entry.reference_quantized_module) == (nn.Conv2d, reference.Conv2d)
    assert (torch.conv2d, F.hardswish) in by_pattern


def test_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "fused.yaml"
    path.write_text(SPEC)
    backend = backquant.BackendConfig.load(path)
    assert backend.validate() == []
    backend.save(tmp_path / "again.yaml")
    assert backquant.BackendConfig.load(tmp_path / "again.yaml") == backend
    layers = (
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU6(),
        nn.Flatten(),
        nn.Linear(16, 4),
        nn.ReLU(),
    )
    report = backquant.explain(
        nn.Sequential(*layers).eval(), torch.randn(1, 3, 4, 4), backend=backend
    )
    rows = {row.operator: row.outcome for row in report.operators}
    assert [rows[name] for name in ("Conv2d", "ReLU6", "LinearReLU")] == 3 * ["quantized"]
    assert "BatchNorm2d" not in [row.operator for row in report.operators if row.outcome == "float"]


def test_a_sequence_that_is_none() -> None:
    with pytest.raises(SpecError) as raised:
        fused_entries("conv2d+batch_norm2d+relu6")
    snapshots.compare(Path(__file__), "no-kernel", str(raised.value))


BY_HAND = {
    "a weighted operator": lambda fix, _: [
        fused_entries(one) for one in re.findall(r"\((conv2d[+\w]*)", fix)
    ],
}
