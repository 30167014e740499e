"""The built-in backends as spec files and as dicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from backquant.backend_config import BackendConfig, get_backend_config, list_backends


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
@pytest.mark.parametrize("name", list_backends())
def test_file_round_trip_is_the_identity(name: str, suffix: str, tmp_path: Path) -> None:
    backend = get_backend_config(name)
    path = tmp_path / f"{name}{suffix}"
    backend.save(path)
    loaded = BackendConfig.load(path)
    assert loaded == backend
    assert [c.fuser_method for c in loaded.configs] == [c.fuser_method for c in backend.configs]
    loaded.save(tmp_path / f"again{suffix}")
    assert (tmp_path / f"again{suffix}").read_text() == path.read_text()


@pytest.mark.parametrize("name", list_backends())
def test_dict_round_trip_is_the_identity(name: str) -> None:
    backend = get_backend_config(name)
    assert BackendConfig.from_dict(backend.to_dict()) == backend


@pytest.mark.parametrize("name", list_backends())
def test_validation_finds_nothing_but_notes(name: str) -> None:
    """Notes: what PyTorch's entries have too, and what is legal though unusual."""
    findings = get_backend_config(name).validate()
    assert {finding.severity for finding in findings} <= {"note"}
    assert {finding.rule for finding in findings} <= {
        "root-without-reference",  # conv + batch norm + F.relu names a root; its conv's entry both
        "fuser-without-fused",  # a transposed convolution absorbs the batch norm and stays itself
    }
