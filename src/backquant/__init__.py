"""backquant: quantization for PyTorch, driven by a declarative description of the backend.

    quantized = backquant.quantize(model, example_inputs, backend="x86", calibration=loader)
    report = backquant.explain(model, example_inputs, backend="qnnpack")
    backquant.save(quantized, "model.bq")

``__init__.pyi`` lists the names that are importable from here, and the rooms that have them; all others
are public in their room (``backquant.observe``, ``backquant.dtypes``, …). A room is imported when one of
its names is first asked for, so that ``import backquant`` itself costs nothing.
"""

from __future__ import annotations

from typing import Any

from backquant.version import __version__ as __version__


def _listed() -> dict[str, str]:
    """The room of every name that ``__init__.pyi`` lists."""
    from backquant.faces import listed  # here: importing backquant alone does without

    return {name: room for name, room in listed(__file__).items() if name != "__version__"}


def __getattr__(name: str) -> Any:
    """The public name ``name``, or the room that is called so; ``__all__`` are the names of no room."""
    from backquant.faces import member

    if name == "__all__":
        return sorted(public for public, room in _listed().items() if room != "backquant")
    return member(__name__, __file__, name)  # names are spelled by rooms


def __dir__() -> list[str]:
    return sorted({"__version__", *_listed()})
