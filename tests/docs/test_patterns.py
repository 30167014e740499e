"""The examples of docs/patterns.md run, and say what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.backend_config import BackendConfig, BackendPatternConfig
from backquant.backend_config.files import json_schema, loads

PAGE = (Path(__file__).parents[2] / "docs" / "patterns.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the page defines, with what it prints as ``printed``."""
    torch.manual_seed(0)
    found: dict[str, Any] = {"__name__": "page", "printed": []}
    found["print"] = lambda value: found["printed"].append(str(value))
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "docs/patterns.md", "exec"), found)
    return found


def test_the_first_graph(names: dict[str, Any]) -> None:
    assert "2 of 2 operators quantized" in names["printed"][0]
    assert "torch.sigmoid in swish" in names["printed"][1]
    x, made = names["x"], names["quantized"]
    assert (made(x) - nn.functional.silu(x)).abs().max() < 0.05


def test_the_reason_is_the_one_on_the_page(names: dict[str, Any]) -> None:
    assert f"# {names['printed'][2]}\n" in PAGE


def test_the_file_says_the_same(names: dict[str, Any]) -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    written = [names["npu"].configs[0], names["entry"]]
    assert loads(text) == BackendConfig("my_npu").set_backend_pattern_configs(written)


def test_the_keys_of_the_file_are_in_the_schema() -> None:
    schema = json_schema()["$defs"]
    assert set(schema["NamedGraph"]["properties"]) == {"name", "inputs", "nodes"}
    assert set(schema["NamedNode"]["properties"]) == {"name", "op", "arguments", "any_order"}


class Excited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)
        self.relu = nn.ReLU()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self.up(self.relu(self.down(x.mean((2, 3), True)))))
        x = torch.mul(gate, x)
        return self.relu(torch.add(x, self.conv(x)))


def test_the_other_entries_match_as_the_page_says(names: dict[str, Any]) -> None:
    from backquant.nn import intrinsic

    image = torch.randn(2, 4, 5, 5)
    fused_module = BackendPatternConfig(intrinsic.ConvAddReLU2d).add_dtype_config(names["static"])
    backend = BackendConfig("b").set_backend_pattern_configs(
        [names["excite_entry"], names["fused_entry"], fused_module]
    )
    made = backquant.quantize(Excited().eval(), image, backend=backend, calibration=[image])
    entries = {row.node: row.entry for row in made.report.rows}
    assert entries["up"] == "squeeze-excite"
    assert entries["conv"] == "ConvAddReLU2d"
    assert made.graph_module.up.weight.dtype is torch.int8
