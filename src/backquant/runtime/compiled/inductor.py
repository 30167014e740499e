"""The parts of TorchInductor that its own code generators use: private to torch, imported here alone.

Whoever compiles imports this module first. Where a version of torch lacks a part, ``check_inductor`` says so;
models then run as they are, uncompiled.
"""

from __future__ import annotations

import torch

from backquant.errors import EngineError

try:
    # imported first: the modules below import each other circularly
    import torch._inductor.lowering
    from torch._inductor import ir
    from torch._inductor.codegen.cpp_template import CppTemplate
    from torch._inductor.lowering import constant_pad_nd, lowerings, register_lowering, view
    from torch._inductor.virtualized import V

    _missing = ""
except ImportError as error:
    _missing = str(error)

__all__ = [
    "CppTemplate",
    "V",
    "check_inductor",
    "constant_pad_nd",
    "ir",
    "lowerings",
    "register_lowering",
    "view",
]


def check_inductor() -> None:
    """Raise ``EngineError`` where this version of torch lacks a part."""
    if _missing:
        raise EngineError(
            f"this version of torch lacks a part of Inductor that our kernels are compiled with: {_missing}",
            where=f"QuantizedModel.compile, torch {torch.__version__.split('+')[0]}",
            fix="call the model as it is: quantized(x)",
        )
