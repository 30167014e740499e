"""JSON of others: each fault of the text is a ``ValueError``."""

import json

import pytest

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
