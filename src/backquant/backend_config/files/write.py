"""A backend description as plain data: strings, numbers, lists and dicts in the layout of ``models``.

Equal dtype configs get one name, and the entries refer to it. Consecutive entries that differ in
their pattern only are written as one entry with ``patterns``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from backquant.backend_config.declared import set_fields
from backquant.backend_config.description import Description
from backquant.backend_config.dtypes import DTypeConfig, DTypeWithConstraints
from backquant.backend_config.files.forms import write, write_record
from backquant.backend_config.files.import_paths import SpellingError
from backquant.backend_config.files.models import SCHEMA_VERSION
from backquant.backend_config.files.spelling import pattern_data
from backquant.backend_config.pattern_config import BackendPatternConfig
from backquant.dtypes import dtype_name, integer_range
from backquant.errors import SpecError


def to_data(config: Description) -> dict[str, Any]:
    """The content of a spec file for ``config``.

    Raises ``SpecError`` naming the entry and the field that holds something without an import path
    (a lambda, a closure), or a number that is not finite.

    >>> import torch
    >>> from backquant.backend_config import DTypeConfig
    >>> static = DTypeConfig(torch.quint8, torch.quint8)
    >>> entry = BackendPatternConfig(torch.add).add_dtype_config(static)
    >>> to_data(Description("mine").set_backend_pattern_config(entry))["entries"]
    [{'pattern': 'torch.add', 'dtype_configs': ['quint8']}]
    """
    names = _Names()
    entries: list[dict[str, Any]] = []
    for index, entry in enumerate(config.shared_configs):
        place = f"configs[{index}] {entry.normal_pattern}"
        entries.append(_entry(entry, names, place))
    data: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "name": config.name}
    for field, value in set_fields(config):
        data[field.name] = _named(lambda f=field, v=value: write(f.kind, v), field.name)  # type: ignore[misc]
    if names.by_name:
        data["dtype_configs"] = names.by_name
    data["entries"] = _grouped(entries)
    return data


class _Names:
    """Names for dtype configs, in order of first use."""

    def __init__(self) -> None:
        self.by_name: dict[str, dict[str, Any]] = {}
        self._by_content: dict[str, str] = {}

    def name(self, config: DTypeConfig) -> str:
        data = write_record(config)
        content = json.dumps(data)
        if content not in self._by_content:
            base = name = _descriptive_name(config)
            number = 2
            while name in self.by_name:
                name = f"{base}_{number}"
                number += 1
            self.by_name[name] = data
            self._by_content[content] = name
        return self._by_content[content]


def _descriptive_name(config: DTypeConfig) -> str:
    """Such as ``quint8``, ``quint8_weight_qint8``, ``dynamic_quint8_weight_qint8``."""
    words = ["dynamic"] if config.is_dynamic else []
    if config.input_dtype is not None:
        words.append(dtype_name(config.input_dtype))
    differs = config.output_dtype not in (config.input_dtype, None)
    if config.output_dtype is not None and differs and not config.is_dynamic:
        words += ["to", dtype_name(config.output_dtype)]
    if config.weight_dtype is not None:
        words += ["weight", dtype_name(config.weight_dtype)]
    return "_".join([*words, *_fixed_range(config.output_dtype_with_constraints)]) or "any"


def _fixed_range(given: DTypeWithConstraints) -> list[str]:
    """``from_-1_to_1`` for fixed qparams: the real range that a byte covers with them."""
    scale, zero_point = given.scale_exact_match, given.zero_point_exact_match
    limits = integer_range(given.dtype)
    if scale is None or zero_point is None or limits is None:
        return []
    low, high = ((bound - zero_point) * scale for bound in (limits[0], limits[1] + 1))
    return ["from", f"{low:g}", "to", f"{high:g}"]


def _entry(entry: BackendPatternConfig, names: _Names, place: str) -> dict[str, Any]:
    reversed_form = entry.pattern is None
    pattern = entry._pattern_complex_format if reversed_form else entry.pattern
    data: dict[str, Any] = {
        "pattern": _named(lambda: pattern_data(pattern, reversed_form), f"{place}: pattern")
    }
    for field, value in set_fields(entry):
        at = f"{place}: {field.name}"
        if field.name == "dtype_configs":
            data[field.name] = [
                _named(lambda c=config: names.name(c), f"{at}[{index}]")  # type: ignore[misc]
                for index, config in enumerate(value)
            ]
        elif field.name not in ("pattern", "pattern_complex_format"):
            data[field.name] = _named(lambda f=field, v=value: write(f.kind, v), at)  # type: ignore[misc]
    return data


def _named(make: Callable[[], Any], place: str) -> Any:
    try:
        return make()
    except SpellingError as problem:
        raise SpecError(
            f"cannot be stored: {problem.what}", where=place, fix=problem.fix
        ) from problem


def _grouped(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of entries that differ in their pattern only, as one entry with ``patterns``."""
    groups: list[tuple[dict[str, Any], list[Any]]] = []
    for entry in entries:
        pattern = entry.pop("pattern")
        if groups and groups[-1][0] == entry and list(groups[-1][0]) == list(entry):
            groups[-1][1].append(pattern)
        else:
            groups.append((entry, [pattern]))
    return [
        {"pattern": patterns[0], **fields}
        if len(patterns) == 1
        else {"patterns": patterns, **fields}
        for fields, patterns in groups
    ]
