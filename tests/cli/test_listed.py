from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from backquant.artifact import manifest
from backquant.backend_config import get_backend_config, json_schema, list_backends
from backquant.cli import listed
from backquant.cli.listed import artifact_schema, listed_backends, published_schema


def test_what_is_stored_is_what_the_descriptions_say() -> None:
    found = listed_backends()
    assert [backend.name for backend in found] == list_backends()
    for backend in found:
        config = get_backend_config(backend.name)
        assert (backend.engine, backend.entries) == (config.engine, len(config.configs))


def test_the_schema_is_the_published_one() -> None:
    assert published_schema() == json_schema()
    assert artifact_schema() == manifest.json_schema()


def test_backends_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "npu_backend.py").write_text(
        "from backquant.backend_config import BackendConfig\n"
        "def backend_config():\n    return BackendConfig('npu').set_engine('onednn')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "npu_backend", raising=False)
    points = [EntryPoint("npu", "npu_backend", "backquant.backends")]
    monkeypatch.setattr(listed.metadata, "entry_points", lambda group: points)
    assert tuple(listed_backends()[-1]) == ("npu", "onednn", 0)
