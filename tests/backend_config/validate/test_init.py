"""The built-in backends under validation."""

from __future__ import annotations

import pytest

from backquant.backend_config import get_backend_config, list_backends
from backquant.backend_config.validate import Finding, validate


@pytest.mark.parametrize("name", list_backends())
def test_built_in_backends_have_no_errors(name):
    findings = validate(get_backend_config(name))
    assert [str(finding) for finding in findings if finding.severity == "error"] == []


def test_method_of_the_config():
    config = get_backend_config("x86")
    assert config.validate() == validate(config)


def test_findings_are_values():
    finding = Finding("note", "rule", "place", "message")
    assert finding == Finding("note", "rule", "place", "message")
    assert hash(finding) == hash(Finding("note", "rule", "place", "message"))
    assert str(finding) == "note: place: message [rule]"
    assert str(Finding("note", "rule", "", "message")) == "note: message [rule]"
