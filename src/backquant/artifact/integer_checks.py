"""What a file may say to kernels of the integer reference: which operators, and which tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

DTYPES = (torch.int8, torch.uint8, torch.int16, torch.uint16)
WEIGHTED = frozenset(
    ["linear", *(f"{conv}{n}d" for conv in ("conv", "conv_transpose") for n in (1, 2, 3))]
)
_POOLS = frozenset(f"max_pool{n}d" for n in (1, 2, 3))
_AVERAGES = frozenset(("avg_pool", "adaptive_avg_pool", "mean"))
_BINARY = frozenset(("add", "sub", "mul", "matmul", "maximum", "minimum"))

Tensors = Mapping[str, torch.Tensor | None]


def _wrong(tensors: Tensors, name: str, dtypes: Sequence[torch.dtype]) -> str:
    tensor = tensors.get(name)
    if tensor is None:
        return f"{name} is missing"
    good = tensor.dtype in dtypes and tensor.numel() > 0
    return "" if good else f"{name} is {str(tensor.dtype)[6:]}{list(tensor.shape)}"


def _weighted(config: Any, tensors: Tensors) -> str:
    """An integer weight, its zero points, a finite unit of sums; a bias and a table, or none."""
    if config.operator not in WEIGHTED:
        return f"operator is {config.operator!r}"
    dims = 2 + int(next((c for c in config.operator if c.isdigit()), 0))
    weight, unit = tensors.get("weight"), tensors.get("unit")
    wrong = _wrong(tensors, "weight", DTYPES) or _wrong(tensors, "unit", (torch.float64,))
    wrong = wrong or _wrong(tensors, "weight_zero_point", (torch.int64,))
    if wrong:
        return wrong
    assert weight is not None and unit is not None
    if weight.dim() != dims or len(config.stride) != dims - 2:
        return f"weight is {list(weight.shape)} for {config.operator}"
    if not (torch.isfinite(unit).all() and (unit >= 0).all()):
        return "unit is not finite and positive"
    optional = {"bias": torch.int64, "table": torch.int32}
    given = [(n, d) for n, d in optional.items() if tensors.get(n) is not None]
    return next(filter(None, (_wrong(tensors, name, (dtype,)) for name, dtype in given)), "")


_WEIGHT = ("weight", "scale", "zero_point")


def _wrong_weight(tensors: Tensors) -> str:
    wrong = _wrong(tensors, "weight", DTYPES) or _wrong(tensors, "scale", (torch.float64,))
    wrong = wrong or _wrong(tensors, "zero_point", (torch.int64,))
    scale = tensors.get("scale")
    if wrong or scale is None:
        return wrong
    usable = bool(torch.isfinite(scale).all() and (scale >= 0).all())
    return "" if usable else "scale is not finite and positive"


def _scaled(config: Any, tensors: Tensors) -> str:
    """An integer weight of two axes, with zero points and finite scales for it, its rows, or a grid."""
    if config.operator != "linear":
        return f"operator is {config.operator!r}"
    wrong = _wrong_weight(tensors)
    if wrong:
        return wrong
    weight, scale, zero_point = (tensors[name] for name in _WEIGHT)
    assert weight is not None and scale is not None and zero_point is not None
    rows = scale.dim() < 2 and scale.numel() in (1, weight.shape[0])
    grid = scale.dim() == 2 and all(
        a % b == 0 for a, b in zip(weight.shape, scale.shape, strict=False)
    )
    if weight.dim() != 2 or not (rows or grid) or zero_point.shape != scale.shape:
        return f"scale is {list(scale.shape)} for a weight {list(weight.shape)}"
    bias = tensors.get("bias")
    good = bias is None or (bias.dtype == torch.float32 and bias.shape == weight.shape[:1])
    return "" if good else "bias is not float32 for each output"


def _scaled_conv(config: Any, tensors: Tensors) -> str:
    """An integer weight of a convolution, with zero points for all of it, and finite scales."""
    if config.operator not in WEIGHTED - {"linear"}:
        return f"operator is {config.operator!r}"
    dims = 2 + int(config.operator[-2])
    wrong = _wrong_weight(tensors)
    if wrong:
        return wrong
    weight, scale, zero_point = (tensors[name] for name in _WEIGHT)
    assert weight is not None and scale is not None and zero_point is not None
    if weight.dim() != dims or len(config.stride) != dims - 2 or scale.dim() != 1:
        return f"weight is {list(weight.shape)} for {config.operator}"
    if zero_point.numel() != 1 and zero_point.dim() != dims:
        return f"zero_point is {list(zero_point.shape)}"
    bias = tensors.get("bias")
    return "" if bias is None or bias.dtype == torch.float32 else "bias is not float32"


def _one_of(operators: frozenset[str]) -> Callable[[Any, Tensors], str]:
    def check(config: Any, tensors: Tensors) -> str:  # noqa: ARG001
        return "" if config.operator in operators else f"operator is {config.operator!r}"

    return check


def _integers(*names: str, dtype: torch.dtype = torch.int64) -> Callable[[Any, Tensors], str]:
    def check(config: Any, tensors: Tensors) -> str:  # noqa: ARG001
        return next(filter(None, (_wrong(tensors, name, (dtype,)) for name in names)), "")

    return check


CHECKERS: dict[str, Callable[[Any, Tensors], str]] = {
    "IntegerWeighted": _weighted,
    "IntegerInGroups": _scaled,
    "IntegerAtEachCall": _scaled,
    "IntegerConvAtEachCall": _scaled_conv,
    "IntegerProductAtEachCall": _one_of(frozenset(("matmul",))),
    "IntegerTable": _integers("table", dtype=torch.int32),
    "IntegerBinary": _one_of(_BINARY),
    "IntegerJoin": _one_of(frozenset(("cat", "stack"))),
    "IntegerMaxPool": _one_of(_POOLS),
    "IntegerAverage": _one_of(_AVERAGES),
    "IntegerSoftmax": _integers("table"),
    "IntegerNorm": _integers("gamma", "beta"),
    "IntegerBatchNorm": _integers("gamma", "beta"),
    "IntegerBilinear": _one_of(frozenset(("bilinear",))),
}
