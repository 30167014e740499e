from __future__ import annotations

import pytest

from backquant.artifact.manifest import check_references
from backquant.errors import ArtifactError

INPUT = {"op": "placeholder", "name": "x", "target": "x"}
OUTPUT = {"op": "output", "name": "output", "target": "output", "args": [{"node": "x"}]}


def test_names_of_attributes_are_no_references() -> None:
    """A table of one attribute looks like a value of one kind."""
    leaf = {"class": "torch.nn.ReLU", "attributes": {"node": "text"}, "buffers": {"tensor": None}}
    check_references({"graph": [INPUT, OUTPUT], "children": {"a": leaf}}, set())


def test_keywords_are_read_like_arguments() -> None:
    call = {"op": "call_function", "name": "f", "target": "torch.relu"}
    call["kwargs"] = {"input": [{"tuple": [{"node": "later"}]}]}  # type: ignore[assignment]
    with pytest.raises(ArtifactError, match="'later'"):
        check_references({"graph": [INPUT, call, OUTPUT]}, set())


def test_modules_stand_for_modules_before_them() -> None:
    leaf = {"class": "torch.nn.ReLU"}
    check_references({"children": {"a": leaf, "b": {"same_as": "a"}}}, set())
    with pytest.raises(ArtifactError, match="'b'"):
        check_references({"children": {"a": {"same_as": "b"}, "b": leaf}}, set())
