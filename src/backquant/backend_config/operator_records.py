"""The records of operators, for rooms below them."""

from __future__ import annotations

import importlib
from typing import Any


def operator_records() -> Any:
    """The room of the operators' records, which is above those that read descriptions: imported when asked.

    >>> operator_records().find("view").name
    'view'
    """
    return importlib.import_module("backquant.operators")
