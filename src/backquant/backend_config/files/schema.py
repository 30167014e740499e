"""The published JSON Schema of spec files, generated from the models."""

from __future__ import annotations

from typing import Any

from backquant.backend_config.files.models import SCHEMA_VERSION, FileModel


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of spec files of the current ``schema_version``, as a new dict.

    It is the content of ``schema_v1.json`` in this package. It checks structure; whether names can be
    imported is checked when a file is loaded.

    >>> json_schema()["required"]
    ['schema_version', 'name']
    """
    schema: dict[str, Any] = _tidy(FileModel.model_json_schema())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:backquant:backend-config:schema:{SCHEMA_VERSION}",
        **schema,
        "title": "backquant backend description",
    }


def _tidy(node: Any) -> Any:
    """Without generated titles and null defaults; alternatives as ``anyOf``.

    An integer is also a number, so ``oneOf`` would refuse it.
    """
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    tidy: dict[str, Any] = {}
    for key, value in node.items():
        if key in ("properties", "$defs"):
            tidy[key] = {name: _tidy(item) for name, item in value.items()}
        elif (key == "title" and isinstance(value, str)) or (key == "default" and value is None):
            continue
        elif key in ("oneOf", "anyOf"):
            options = tidy.setdefault("anyOf", [])
            options.extend(_tidy(option) for option in value)
        else:
            tidy[key] = _tidy(value)
    if "anyOf" in tidy:
        tidy["anyOf"] = _flat(tidy["anyOf"])
    return tidy


def _flat(options: list[Any]) -> list[Any]:
    """Alternatives that are only alternatives themselves, on one level, each once."""
    flat: list[Any] = []
    for option in options:
        inner = option["anyOf"] if list(option) == ["anyOf"] else [option]
        flat.extend(item for item in inner if item not in flat)
    return flat
