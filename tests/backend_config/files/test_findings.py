from __future__ import annotations

import pytest

from backquant.backend_config.files import check_file
from backquant.errors import SpecError

HEAD = "schema_version: 1\nname: mine\n"


def test_a_broken_file(write):
    path = write("mine.yaml", HEAD + "enngine: x\nentries:\n- pattern: add\n")
    first, second = check_file(path)
    assert (first.severity, first.rule) == ("error", "file")
    assert (first.message, first.fix) == ("unknown field", 'did you mean "engine"?')
    assert first.place == f"{path}:3: enngine"
    assert second.place == f"{path}:5: entries[0].pattern"


def test_findings_of_validation_have_lines(write):
    entry = "- {pattern: torch.nn.Conv1d, fused_module: torch.nn.Linear}\n"
    path = write("mine.yaml", HEAD + "extends: x86\nentries:\n" + entry)
    errors = [finding for finding in check_file(path) if finding.severity == "error"]
    assert [finding.rule for finding in errors] == ["fused-without-fuser"]
    assert errors[0].place == f"{path}:5: entries[0].fused_module (torch.nn.Conv1d)"


def test_the_engine_is_passed_on(write):
    class Engine:
        dtypes = ()

    entry = "- {pattern: torch.add, dtype_configs: [{input_dtype: quint8}]}\n"
    path = write("mine.yaml", HEAD + "entries:\n" + entry)
    assert check_file(path) == []
    assert [
        finding.rule for finding in check_file(path, (), lambda config: config.validate(Engine()))
    ] == ["engine-dtype"]


def test_no_file(tmp_path):
    with pytest.raises(SpecError, match="no such file"):
        check_file(tmp_path / "none.yaml")
