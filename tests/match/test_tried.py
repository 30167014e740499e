"""What the operator of an entry has no place for is found by ``check``, with entry and dtype config."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
)
from backquant.cli.models import findings
from backquant.match.satisfiable import unsatisfiable

INT8, SHARE = torch.qint8, ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
FIXED = DTypeWithConstraints(INT8, scale_exact_match=2**-7, zero_point_exact_match=0)
WEIGHTED = DTypeConfig(INT8, INT8, INT8, torch.float)
NEVER = {
    "shared_dtype": BackendPatternConfig(nn.MaxPool2d)
    .set_observation_type(SHARE)
    .add_dtype_config(DTypeConfig(INT8, torch.int16)),
    "shared_scale": BackendPatternConfig(nn.MaxPool2d)
    .set_observation_type(SHARE)
    .add_dtype_config(DTypeConfig(INT8, FIXED)),
    "no_weight": BackendPatternConfig(torch.add).add_dtype_config(WEIGHTED),
    "no_place_of_the_weight": BackendPatternConfig(F.linear).add_dtype_config(WEIGHTED),
}


@pytest.mark.parametrize("name", NEVER)
def test_what_no_plan_asks_for(name: str, snapshot) -> None:
    backend = BackendConfig("b").set_backend_pattern_config(NEVER[name])
    [finding] = unsatisfiable(backend)
    snapshot(name, str(finding))


def test_of_a_file_with_its_line(tmp_path) -> None:
    path = tmp_path / "npu.yaml"
    path.write_text(
        "schema_version: 1\nname: npu\nentries:\n- pattern: torch.add\n  dtype_configs:\n"
        "  - {input_dtype: qint8, output_dtype: qint8, weight_dtype: qint8}\n"
    )
    [finding] = [each for each in findings(str(path)) if each.severity == "error"]
    assert "npu.yaml:6" in finding.place and "dtype_configs[0]" in finding.place
