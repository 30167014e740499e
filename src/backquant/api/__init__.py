"""The calls that compose the steps: one call from a model to a quantized one, and the steps by name.

``__init__.pyi`` lists the names; a module is imported when one of its names is first asked for, so that
``quantize`` does without what exports, searches and reads checkpoints.
"""

from __future__ import annotations

from typing import Any

from backquant.faces import listed, member


def __getattr__(name: str) -> Any:
    return sorted(listed(__file__)) if name == "__all__" else member(__name__, __file__, name)


def __dir__() -> list[str]:
    return sorted(listed(__file__))
