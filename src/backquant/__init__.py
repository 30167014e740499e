"""backquant: quantization for PyTorch, driven by a declarative description of the backend.

    quantized = backquant.quantize(model, example_inputs, backend="x86", calibration=loader)
    report = backquant.explain(model, example_inputs, backend="qnnpack")
    backquant.save(quantized, "model.bq")

``__init__.pyi`` lists the names that are importable from here, and the rooms that have them; all others
are public in their room (``backquant.observe``, ``backquant.dtypes``, …). A room is imported when one of
its names is first asked for, so that ``import backquant`` itself costs nothing.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from backquant.version import __version__ as __version__

_LISTED = r"(?m)^from (backquant[\w.]*) import \(?\s*(\w+) as \2\b"
_rooms: dict[str, str] = {}


def _listed() -> dict[str, str]:
    """The room of every name that ``__init__.pyi`` lists."""
    if not _rooms:
        from pathlib import Path  # here: importing backquant alone does without

        text = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
        found = {name: room for room, name in re.findall(_LISTED, text)}
        _rooms.update({name: room for name, room in found.items() if name != "__version__"})
    return _rooms


def __getattr__(name: str) -> Any:
    """The public name ``name``, or the room that is called so; ``__all__`` are the names of no room."""
    if name == "__all__":
        return sorted(public for public, room in _listed().items() if room != "backquant")
    if not name.startswith("_") and _listed().get(name, "backquant") != "backquant":
        return getattr(importlib.import_module(_listed()[name]), name)  # names are spelled by rooms
    try:
        return importlib.import_module(f"backquant.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"backquant.{name}":
            raise
    raise AttributeError(f"module 'backquant' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({"__version__", *_listed()})
