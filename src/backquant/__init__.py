"""backquant: quantization for PyTorch, driven by a declarative description of the backend.

    quantized = backquant.quantize(model, example_inputs, backend="x86", calibration=loader)
    report = backquant.explain(model, example_inputs, backend="qnnpack")
    backquant.save(quantized, "model.bq")

Every public name of the rooms below is importable from here; a room is imported when one of its
names is first asked for, so that ``import backquant`` itself costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from backquant.version import __version__ as __version__

if TYPE_CHECKING:
    from backquant.api import *
    from backquant.artifact import *
    from backquant.backend_config import *
    from backquant.conformance import *
    from backquant.dtypes import *
    from backquant.errors import *
    from backquant.interop import *
    from backquant.observe import *
    from backquant.qconfig import *

_ROOMS = (
    "errors", "dtypes", "backend_config", "observe", "qconfig", "artifact", "api", "interop", "conformance",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """The public name ``name`` of the first room that has it; ``__all__`` are the names of all rooms."""
    if name == "__all__":
        return [public for public in __dir__() if public not in _ROOMS]
    if not name.startswith("_") and name not in _ROOMS:
        for room in _ROOMS:
            module = importlib.import_module(f"backquant.{room}")
            if name in module.__all__:
                return getattr(module, name)  # not kept here: names are spelled by their rooms
    try:
        return importlib.import_module(f"backquant.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"backquant.{name}":
            raise
    raise AttributeError(f"module 'backquant' has no attribute {name!r}")


def __dir__() -> list[str]:
    names = {"__version__", *_ROOMS}
    for room in _ROOMS:
        names.update(importlib.import_module(f"backquant.{room}").__all__)
    return sorted(names)
