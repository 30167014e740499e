"""Conditions in spec files: what is wrong is said with line and field."""

from __future__ import annotations

import pytest

from backquant import BackendConfig
from backquant.backend_config.files import loads
from backquant.backend_config.import_paths import SpecFileError

HEAD = """schema_version: 1
name: t
dtype_configs:
  int8: {input_dtype: qint8, output_dtype: qint8, weight_dtype: qint8, where: {groups: 1}}
entries:
- pattern: torch.nn.Conv2d
  dtype_configs: [int8]
"""
WRONG = {
    "comparison": "  where:\n    stride: {mx: 3}\n",
    "deep": "  where:\n    kernel_size: 3\n    any:\n    - stride: 1\n    - not: {strid: 1}\n",
    "expression": "  where:\n    stride: 1\n    'kernel_size *': 3\n",
    "bound": "  where: {stride: {max: [1]}}\n",
    "list": "  where: {any: {stride: 1}}\n",
}


@pytest.mark.parametrize("name", WRONG)
def test_places(name: str, snapshot) -> None:
    with pytest.raises(SpecFileError) as error:
        loads(HEAD + WRONG[name], file="t.yaml")
    snapshot(f"condition_{name}", str(error.value))


def test_names_of_a_shared_dtype_config(snapshot) -> None:
    text = HEAD.replace("groups: 1", "groop: 1")
    with pytest.raises(SpecFileError) as error:
        loads(text, file="t.yaml")
    snapshot("condition_shared", str(error.value))


def test_contradictions_are_found_by_check() -> None:
    config = loads(HEAD + "  where: {groups: {min: 2}}\n")
    [finding] = [f for f in config.validate() if f.rule == "contradiction"]
    assert finding.message == "nothing satisfies groups ≥ 2, groups = 1"
    assert str(loads(HEAD).diff(config).entries[0].fields[0]) == "+ where: groups ≥ 2"


def test_null_takes_an_inherited_condition_back(tmp_path) -> None:
    (tmp_path / "base.yaml").write_text(HEAD + "  where: {batch: 1}\n")
    child = "schema_version: 1\nname: c\nextends: base.yaml\nentries:\n"
    child += "- {pattern: torch.nn.Conv2d, where: null}\n"
    (tmp_path / "child.yaml").write_text(child)
    assert BackendConfig.load(tmp_path / "base.yaml").configs[0].where is not None
    assert BackendConfig.load(tmp_path / "child.yaml").configs[0].where is None
