from __future__ import annotations

from pathlib import Path

import pytest

from backquant.backend_config import BackendConfig
from backquant.cli.models import findings, load_backend
from backquant.errors import SpecError, UnknownBackendError
from backquant.lower import engine as engines
from backquant.lower.engine import MachineFacts


def test_names_and_files(here: Path) -> None:
    BackendConfig("mine").save(here / "mine.yaml")
    assert load_backend("mine.yaml").name == "mine" and load_backend("x86").name == "x86"
    with pytest.raises(UnknownBackendError):
        load_backend("mine")
    with pytest.raises(SpecError):
        load_backend("other.yaml")


def test_a_file_may_name_classes_of_allowed_packages(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(here)
    (here / "bq_ops.py").write_text("from torch import nn\nclass Swish(nn.Module):\n    pass\n")
    (here / "mine.yaml").write_text(
        "schema_version: 1\nname: mine\nentries:\n  - pattern: bq_ops.Swish\n"
    )
    with pytest.raises(SpecError):
        load_backend("mine.yaml")
    assert len(load_backend("mine.yaml", ["bq_ops"]).configs) == 1
    assert [f.rule for f in findings("mine.yaml")] == ["file"]
    assert "file" not in [f.rule for f in findings("mine.yaml", ["bq_ops"])]


def test_what_is_said_about_an_engine_that_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = MachineFacts("aarch64", quantized_engines=("qnnpack",))
    monkeypatch.setattr(engines, "machine_facts", lambda: facts)
    assert [f.severity for f in findings("x86") if f.rule == "engine"] == ["note"]


def test_an_engine_that_does_not_exist_is_an_error(here: Path) -> None:
    BackendConfig("mine").set_engine("x68").save(here / "mine.yaml")
    [finding] = [f for f in findings("mine.yaml") if f.rule == "engine"]
    assert finding.severity == "error" and "x86" in str(finding.fix)


def test_dtypes_that_the_engine_lacks(here: Path) -> None:
    (here / "mine.yaml").write_text(
        "schema_version: 1\nname: mine\nengine: x86\nentries:\n"
        "  - pattern: torch.add\n    dtype_configs:\n      - {input_dtype: qint32, output_dtype: qint32}\n"
    )
    lacking = [f for f in findings("mine.yaml") if f.rule == "engine-dtype"]
    assert lacking and all(f.severity == "error" and "mine.yaml:" in f.place for f in lacking)
