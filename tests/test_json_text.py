"""JSON of others: each fault of the text is a ``ValueError``."""

import json
from pathlib import Path

import pytest

from backquant.accuracy.search import runners as times_file
from backquant.json_text import read_json


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"a": {"b": 1, "b": 1}}',
        "\ud800",
        "1" * 5000,
        b"\xff",
    ],
)
def test_faults(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        read_json(text)


def test_what_is_well_is_as_json_reads_it() -> None:
    text = json.dumps({"a": [1, 2.5, None, {"b": "\ud83d\ude00"}], "c": {}})
    assert read_json(text) == json.loads(text)


def test_measured_times_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    for fault in ("[" * 100_000, '{"of": 1, "of": 2}'):
        path = tmp_path / "state.json"
        path.write_text(fault)
        assert times_file._read(path) == {}
