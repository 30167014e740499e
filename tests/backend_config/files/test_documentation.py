"""The examples of docs/spec-files.md load, and mean what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

import backquant
from backquant.backend_config import BackendPatternConfig, get_backend_config, normal_form
from backquant.backend_config.conditions import contradictions
from backquant.backend_config.conditions.expressions import FUNCTIONS, OPERATOR, SUBJECTS, TENSOR
from backquant.backend_config.files import dumps, loads

PAGE = Path(__file__).resolve().parents[3] / "docs" / "spec-files.md"
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
_AXES = ("_depth", "_height", "_width")


@pytest.mark.parametrize("text", EXAMPLES)
def test_example_loads_without_findings(text):
    config = loads(text, file="docs/spec-files.md")
    assert [str(finding) for finding in config.validate() if finding.severity == "error"] == []
    assert loads(dumps(config)) == config


def test_there_are_two_examples():
    assert len(EXAMPLES) == 2


def test_the_extending_example():
    child, x86 = loads(EXAMPLES[1]), get_backend_config("x86")
    conv = normal_form(torch.nn.Conv2d)
    assert len(child.entries[conv].dtype_configs) == 1
    assert child.entries[conv].qat_module is x86.entries[conv].qat_module
    linear = normal_form(torch.nn.Linear)
    assert len(child.entries[linear].dtype_configs) == len(x86.entries[linear].dtype_configs) + 1
    gone = set(x86.entries) - set(child.entries)
    assert gone == {normal_form(torch.nn.LSTM), normal_form(torch.nn.GRU)}
    assert list(child.entries)[-1] == normal_form(torch.sub)


def test_every_quantity_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    names = [name for name in (*OPERATOR, *TENSOR) if not name.endswith(_AXES) or name in TENSOR]
    assert [name for name in (*names, *SUBJECTS, *FUNCTIONS) if f"`{name}`" not in page] == []


def test_the_condition_of_the_page():
    text = PAGE.read_text(encoding="utf-8").split("```text\nwhere:\n")[1].split("```")[0]
    where = yaml.safe_load("where:\n" + text)["where"]
    entry = BackendPatternConfig(torch.nn.Conv2d).set_where(where)
    assert list(contradictions(entry.where)) == []


@pytest.mark.parametrize("text", EXAMPLES)
def test_the_examples_quantize(text):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
    ).eval()
    data = [torch.randn(4, 8) for _ in range(2)]
    quantized = backquant.quantize(model, data[0], backend=loads(text), calibration=data)
    assert quantized.report.coverage == 1.0
