"""Spec files with keys of earlier versions are read as what they say, with a warning that has the line."""

from __future__ import annotations

import warnings

import pytest

from backquant.backend_config.files import dumps, loads
from backquant.backend_config.import_paths import SpecFileError

FILE = """\
schema_version: 1
name: mine
extends: xnnpack
defaults:
  activation: {observer: minmax, dtype: qint8}
  weight: {observer: minmax, dtype: qint8}
  overrides:
    - operators: [torch.nn.Linear]
      activation: {observer: placeholder, dtype: qint8, is_dynamic: true}
      beside_float: true
  leave_float:
    - operators: [torch.cat]
      with_table: true
    - operators: [torch.add]
      beside_float: true
qdq:
  leave_float:
    - {operators: [.mul], beside_float: true}
"""
NOW = (
    FILE.replace("beside_float", "between_float_operators", 1)
    .replace("      beside_float", "      unless_between_quantized")
    .replace(" beside_float", " unless_between_quantized")
)


def test_each_is_read_and_named_with_its_line() -> None:
    with pytest.warns(DeprecationWarning) as heard:
        config = loads(FILE, file="mine.yaml")
    assert [str(one.message) for one in heard] == [
        "mine.yaml:10: defaults.overrides[0].beside_float is called 'between_float_operators' now",
        "mine.yaml:15: defaults.leave_float[1].beside_float is called 'unless_between_quantized' now",
        "mine.yaml:18: qdq.leave_float[0].beside_float is called 'unless_between_quantized' now",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config == loads(NOW)
        assert "beside_float" not in dumps(config)


def test_no_rules_and_a_reset_are_read() -> None:
    head = "schema_version: 1\nname: mine\nextends: xnnpack\n"
    assert loads(f"{head}defaults: null\nqdq: null\n").qdq is None
    assert loads(f"{head}qdq: {{quantize_constants: true}}\n").qdq.leave_float == ()


def test_both_names_that_differ_are_refused_at_the_line() -> None:
    text = NOW.replace(
        "with_table: true", "unless_between_quantized: true\n      beside_float: false"
    )
    with pytest.raises(SpecFileError, match="are two names of one field") as caught:
        loads(text, file="mine.yaml")
    assert caught.value.problems[0].line == 14
    with pytest.warns(DeprecationWarning, match="mine.yaml:14"):
        loads(text.replace("beside_float: false", "beside_float: true"), file="mine.yaml")


def test_a_misspelt_key_is_told_the_current_name() -> None:
    with pytest.raises(SpecFileError) as caught:
        loads(NOW.replace("between_float_operators", "betwen_float_operators"))
    assert caught.value.problems[0].fix == 'did you mean "between_float_operators"?'
    with pytest.raises(SpecFileError) as caught:
        loads(NOW.replace("with_table", "besid_float"))
    assert "beside_float" not in caught.value.problems[0].fix
