"""Saving and loading is the identity; malformed text gives SpecError and nothing else."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from backquant.backend_config import BackendConfig, get_backend_config, list_backends
from backquant.backend_config.files import dumps, loads
from backquant.errors import SpecError

RELAXED = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
FORMATS = ("yaml", "json")
_CONDITION = re.compile(r"^ +where:.*\n(?: {4,}.*\n)*", re.MULTILINE)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", list_backends())
def test_built_in_backends(name, format):
    config = get_backend_config(name)
    assert loads(dumps(config, format), format) == config


@pytest.mark.parametrize("name", list_backends())
def test_files_are_stable_and_short(name):
    config = get_backend_config(name)
    text = dumps(config)
    assert dumps(loads(text)) == text
    # Shared tables, then three lines for each entry, beside its condition.
    conditions = sum(len(found.splitlines()) for found in _CONDITION.findall(text))
    assert len(text.splitlines()) < 200 + 3 * len(config.configs) + conditions


@pytest.mark.parametrize("format", FORMATS)
def test_any_backend(any_backend, format):
    @RELAXED
    @given(any_backend)
    def check(config: BackendConfig) -> None:
        assert loads(dumps(config, format), format) == config

    check()


def test_json_text_is_json(any_backend):
    @RELAXED
    @given(any_backend)
    def check(config: BackendConfig) -> None:
        text = dumps(config, "json")
        assert json.loads(text)["name"] == config.name
        assert json.loads(text)["schema_version"] == 1

    check()


def load_or_spec_error(text: str, format: str) -> None:
    try:
        loads(text, format)
    except SpecError as error:
        assert str(error)


SOURCES = {format: dumps(get_backend_config("qnnpack_pt2e"), format) for format in FORMATS}
EDITS = st.lists(
    st.tuples(
        st.integers(0, 10_000),
        st.integers(0, 30),
        st.text(max_size=8) | st.sampled_from(["&a ", "*a", "!!x ", "[", "}", ": ", "\t", "\x00"]),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("format", FORMATS)
def test_damaged_files(format):
    @settings(RELAXED, max_examples=100)
    @given(EDITS)
    def check(edits) -> None:
        text = SOURCES[format]
        for start, length, insert in edits:
            at = start % len(text)
            text = text[:at] + insert + text[at + length :]
        load_or_spec_error(text, format)

    check()


@pytest.mark.parametrize("format", FORMATS)
def test_any_text(format):
    @settings(RELAXED, max_examples=100)
    @example("\ud800")
    @example("\x00")
    @example("[" * 5000)
    @example("{a: " * 5000)
    @example("- " * 5000)
    @example("&a [*a, *a]")
    @example("? [a, b]\n: c")
    @example('"\\ud800"')
    @given(st.text())
    def check(text: str) -> None:
        load_or_spec_error(text, format)

    check()


FIELDS = [
    *("pattern", "patterns", "reversed", "nodes", "op", "literal", "inputs", "dtype_configs"),
    *("input_dtype", "dtype", "fuser_method", "sequential", "factory", "with_args"),
    *("defaults", "activation", "observer", "operators"),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(FIELDS),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


def test_any_values_in_any_field():
    fields = ["name", "engine", "extends", "remove", "defaults", "dtype_configs", "entries"]

    @settings(RELAXED, max_examples=100)
    @given(st.dictionaries(st.sampled_from(fields), VALUES), VALUES)
    def check(data, entry) -> None:
        base = {"schema_version": 1, "name": "x", "entries": [entry]}
        load_or_spec_error(json.dumps({**base, **data}), "json")

    check()


def test_any_values_in_an_entry():
    fields = ["pattern", "patterns", "dtype_configs", "fuser_method", "input_type_to_index"]

    @settings(RELAXED, max_examples=100)
    @given(st.dictionaries(st.sampled_from(fields), VALUES))
    def check(entry) -> None:
        data = {"schema_version": 1, "name": "x", "entries": [{"pattern": "torch.add", **entry}]}
        load_or_spec_error(json.dumps(data), "json")

    check()
