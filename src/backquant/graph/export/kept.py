"""What later steps have to know of a capture, kept with the graph module: they carry it on."""

from __future__ import annotations

from typing import Any

import torch

from backquant.graph.export.structure import Interface, Structure

_KEY = "backquant_interface"
_OUTPUT = "backquant_output"


def interface_of(module: Any) -> Interface | None:
    """The interface of a graph module that was exported; ``None`` for one that was traced.

    >>> interface_of(torch.nn.ReLU()) is None
    True
    """
    meta = getattr(module, "meta", None)
    found = meta.get(_KEY) if isinstance(meta, dict) else None
    return found if isinstance(found, Interface) else None


def set_interface(module: torch.fx.GraphModule, interface: Interface | None) -> None:
    """Keep ``interface`` with a graph module; later steps carry it on.

    >>> gm = torch.fx.symbolic_trace(torch.nn.ReLU())
    >>> set_interface(gm, Interface((), Structure("value")))
    >>> interface_of(gm).arguments
    ()
    """
    if interface is not None:
        module.meta[_KEY] = interface


def output_of(module: Any) -> Structure | None:
    """The structure of what a traced model returned, where it holds classes.

    >>> output_of(torch.nn.ReLU()) is None
    True
    """
    meta = getattr(module, "meta", None)
    found = meta.get(_OUTPUT) if isinstance(meta, dict) else None
    return found if isinstance(found, Structure) else None


def set_output(module: torch.fx.GraphModule, output: Structure) -> None:
    """Keep ``output`` with a graph module that was traced; later steps carry it on.

    >>> gm = torch.fx.symbolic_trace(torch.nn.ReLU())
    >>> set_output(gm, Structure("value"))
    >>> output_of(gm)
    Structure(kind='value', keys=(), parts=(), name='', make=None)
    """
    module.meta[_OUTPUT] = output
