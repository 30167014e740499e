"""Quantization as hardware rounds: ``torch.ops.backquant.quantize_rounded`` and ``requantize``.

    quantize_rounded    q = clamp(round(x / scale) + zero_point), in the rounding that is named
    requantize          x holds sums in steps of ``unit``: they are taken back to integers, and requantized
                        by the arithmetic that is named (``backquant.dtypes.requantization``)

The operators of ``quantized_decomposed`` round halves to even, and know of no sums.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from backquant.dtypes import Requantization, Rounding, requantize_sums, round_to
from backquant.errors import EngineError

_LIBRARY: list[torch.library.Library] = []


def quantize_rounded(
    input: Tensor,
    scale: float,
    zero_point: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    rounding: str,
) -> Tensor:
    """``input`` (float32, any shape) as integers of the same shape.

    >>> quantize_rounded(torch.tensor([0.5, 1.5, -0.5]), 1.0, 0, -128, 127, torch.int8, "half_up").tolist()
    [1, 2, 0]
    """
    steps = round_to(input.double() / scale, Rounding(rounding)) + zero_point
    return steps.clamp(quant_min, quant_max).to(dtype)


def requantize(
    input: Tensor,
    unit: Tensor,
    axis: int,
    scale: float,
    zero_point: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    arithmetic: str,
    rounding: str,
) -> Tensor:
    """Sums as integers of the same shape; ``unit``: their step, one or one for each slice along ``axis``.

    >>> sums = torch.tensor([[0.25, -0.5]])
    >>> unit = torch.tensor([0.25, 0.25])
    >>> requantize(sums, unit, 1, 0.5, 3, -128, 127, torch.int8, "fixed_point", "half_up").tolist()
    [[4, 2]]
    """
    if unit.numel() > 1:
        shape = [1] * input.dim()
        shape[axis] = -1
        unit = unit.reshape(shape)
    else:
        unit = unit.reshape(())
    step = unit.double()
    sums = torch.round(input.double() / step).to(torch.int64)
    made = requantize_sums(sums, step / scale, Requantization(arithmetic), Rounding(rounding))
    return (made + zero_point).clamp(quant_min, quant_max).to(dtype)


def register_requantize() -> None:
    """Make the operators callable as ``torch.ops.backquant.*``. Does nothing when they are already.

    >>> register_requantize()
    >>> torch.ops.backquant.quantize_rounded(torch.tensor([2.5]), 1.0, 0, 0, 9, torch.uint8, "half_away")
    tensor([3], dtype=torch.uint8)
    """
    if _LIBRARY:
        return
    library = torch.library.Library("backquant", "FRAGMENT")
    tail = "float scale, int zero_point, int quant_min, int quant_max, ScalarType dtype"
    library.define(f"quantize_rounded(Tensor input, {tail}, str rounding) -> Tensor")
    library.define(
        f"requantize(Tensor input, Tensor unit, int axis, {tail}, str arithmetic, str rounding) -> Tensor"
    )
    for operator in (quantize_rounded, requantize):
        library.impl(operator.__name__, operator, "CompositeExplicitAutograd")
    _LIBRARY.append(library)


# The quantize/dequantize operators on plain integer tensors: ``torch.ops.quantized_decomposed``.
#
# The dispatcher allows one registration per operator and process, and PyTorch's own (which Inductor
# loads, too) is not loaded by ``import torch``. So PyTorch's is loaded when it is asked for.

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
