"""The texts of usage errors are in ``messages``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backquant.cli.export_command import beside, parse_dynamic
from backquant.errors import UsageError


def test_a_target_or_a_file_is_named(snapshot: Any) -> None:
    with pytest.raises(UsageError) as raised:
        beside(Path("model.bq"), None)
    snapshot("export-nowhere", raised.value)


@pytest.mark.parametrize("text", ["x", "x:first=batch", "0:0=batch", "x:0=a b"])
def test_a_dynamic_axis_has_a_name_and_a_number(text: str, snapshot: Any) -> None:
    with pytest.raises(UsageError) as raised:
        parse_dynamic([text])
    snapshot("export-axis", raised.value, {repr(text): "'<text>'"})
