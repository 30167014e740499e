"""Which dict literals can be said with setters."""

from __future__ import annotations

import libcst as cst
import pytest

from backquant.migrate.setters import KEYS, setters


@pytest.mark.parametrize("cls", sorted(KEYS))
def test_every_key_has_a_setter_of_the_class(cls: str) -> None:
    import backquant

    config = getattr(backquant, cls)
    samples = {
        "object_type": "[(A, q)]",
        "module_name_regex": "[('a', q)]",
        "module_name": "[('a', q)]",
        "module_name_object_type_order": "[('a', A, 0, q)]",
        "float_to_observed_custom_module_class": "{'static': {A: B}}",
        "observed_to_quantized_custom_module_class": "{'static': {A: B}}",
    }
    for key in KEYS[cls]:
        literal = cst.parse_expression(f"{{{key!r}: {samples.get(key, 'value')}}}")
        assert isinstance(literal, cst.Dict)
        found = setters(cls, literal)
        assert found is not None
        assert len(found) == 1
        assert callable(getattr(config, found[0][0]))


def test_keys_are_those_of_from_dict() -> None:
    """What has no setter is wrapped; nothing is known here that the class does not know."""
    from backquant.qconfig import ConvertCustomConfig, FuseCustomConfig, PrepareCustomConfig

    wrapped = {"standalone_module_name", "standalone_module_class"}
    assert {*KEYS["PrepareCustomConfig"]} | wrapped == {*PrepareCustomConfig._KEYS}
    assert {*KEYS["ConvertCustomConfig"]} == {*ConvertCustomConfig._KEYS}
    assert {*KEYS["FuseCustomConfig"]} == {*FuseCustomConfig._KEYS}


def test_keys_of_a_mapping_are_those_of_to_dict() -> None:
    from backquant import QConfigMapping

    assert {*KEYS["QConfigMapping"]} == {*QConfigMapping().to_dict()}


@pytest.mark.parametrize(
    "literal",
    [
        "{**a}",
        "{a: 1}",
        "{'a' 'b': 1}",
        "{f'': q}",
        "{b'': q}",
        "{'module_name': [('a',)]}",
        "{1: 2}",
    ],
)
def test_what_cannot_be_said(literal: str) -> None:
    parsed = cst.parse_expression(literal)
    assert isinstance(parsed, cst.Dict)
    assert setters("QConfigMapping", parsed) is None


def test_an_empty_dict_is_an_empty_config() -> None:
    assert setters("QConfigMapping", cst.Dict([])) == []
