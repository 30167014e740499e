from __future__ import annotations

import json
from importlib import resources

from backquant.backend_config.files import json_schema


def packaged_schema() -> dict:
    package = resources.files("backquant.backend_config.files")
    return json.loads(package.joinpath("schema_v1.json").read_text(encoding="utf-8"))


def test_packaged_schema_is_current():
    assert packaged_schema() == json_schema(), "run: python tools/generate_backend_docs.py"


def test_every_reference_resolves():
    schema = json_schema()
    text = json.dumps(schema)
    names = {part.split('"')[0] for part in text.split("#/$defs/")[1:]}
    assert names == set(schema["$defs"])


def test_an_integer_bound_is_not_excluded_by_one_of():
    assert '"oneOf"' not in json.dumps(json_schema())


def test_result_is_a_new_dict():
    json_schema()["title"] = "changed"
    assert json_schema()["title"] != "changed"
