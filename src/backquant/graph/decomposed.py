"""The quantize/dequantize operators on plain integer tensors: ``torch.ops.quantized_decomposed``.

The dispatcher allows one registration per operator and process, and PyTorch's own (which Inductor
loads, too) is not loaded by ``import torch``. So PyTorch's is loaded when it is asked for.
"""

from __future__ import annotations

import importlib

import torch

from backquant.errors import EngineError

# The module of this PyTorch that registers the operators. Its name is data: nothing is imported
# from it.
_REGISTRATION = "torch.ao.quantization.fx._decomposed"


def register_quantized_decomposed() -> None:
    """Make ``torch.ops.quantized_decomposed.*`` callable. Does nothing when it is already.

    Raises:
        EngineError: this PyTorch has no such operators.

    >>> register_quantized_decomposed()
    >>> op = torch.ops.quantized_decomposed.quantize_per_tensor.default
    >>> op(torch.tensor([0.5]), 0.1, 0, -128, 127, torch.int8)
    tensor([5], dtype=torch.int8)
    """
    if _registered():
        return
    try:
        importlib.import_module(_REGISTRATION)
    except ImportError as error:
        raise EngineError(
            "this PyTorch has no quantized_decomposed operators",
            where=f"torch {torch.__version__}",
            fix="pip install 'torch>=2.12,<2.16'",
        ) from error


def _registered() -> bool:
    return hasattr(torch.ops.quantized_decomposed, "quantize_per_tensor")
