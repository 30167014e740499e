"""The tensors of a kernel module that a file builds: dtypes and shapes that belong together.

Engines below the kernels check little of it, and read memory by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from backquant.artifact import integer_checks
from backquant.artifact.kernels import PACKAGE
from backquant.dtypes import bits_of_values
from backquant.errors import ArtifactError

Tensors: TypeAlias = Mapping[str, torch.Tensor | None]


def check_tensors(cls: type, config: Any, tensors: Tensors, where: str) -> None:
    """Dtypes and shapes of a kernel module's tensors. Raises ``ArtifactError``.

    >>> from backquant.lower.kernels.lookup import Lookup, LookupConfig
    >>> check_tensors(Lookup, LookupConfig("x"), {"table": torch.zeros(3)}, "act")
    Traceback (most recent call last):
    backquant.errors.ArtifactError: the tensors of Lookup do not fit: table is float32[3]
      where  act
    """
    for base in cls.__mro__:
        checker = _CHECKERS.get(base.__name__)
        if checker is not None and base.__module__.startswith(PACKAGE):
            wrong = checker(config, tensors)
            if wrong:
                raise ArtifactError(
                    f"the tensors of {cls.__name__} do not fit: {wrong}", where=where
                )
            return
    raise ArtifactError(f"{cls.__name__} is no kernel that a file may build", where=where)


def _told(name: str, tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return f"{name} is missing"
    return f"{name} is {str(tensor.dtype)[6:]}{list(tensor.shape)}"


def _is(tensor: torch.Tensor | None, dtypes: Sequence[torch.dtype], dims: Sequence[int]) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype in dtypes
        and tensor.dim() in dims
        and tensor.numel() > 0
    )


def _weighted(config: Any, tensors: Tensors) -> str:
    """``weight``, ``weight_scale``, ``weight_zero_point``, ``bias`` of one convolution or linear layer."""
    weight = tensors.get("weight")
    spatial = len(getattr(config, "stride", ()))
    dtypes = (getattr(config, "weight_dtype", torch.int8),)
    if dtypes[0] not in (torch.int8, torch.float16) or not _is(weight, dtypes, (2 + spatial,)):
        return _told("weight", weight)
    assert weight is not None
    operator = getattr(config, "operator", "")
    groups = getattr(config, "groups", 1)
    is_transposed = operator.startswith("conv_transpose")
    out = weight.shape[1] * groups if is_transposed else weight.shape[0]
    lists = [getattr(config, name, ()) for name in ("padding", "dilation")]
    if operator and spatial != int(next((c for c in operator if c.isdigit()), 0)):
        return f"{operator} with {spatial} strides"
    if spatial > 3 or any(len(numbers) != spatial for numbers in lists):
        return f"{lists} for {spatial} dimensions"
    if is_transposed and len(config.output_padding) != spatial:
        return f"{config.output_padding} for {spatial} dimensions"
    if weight.shape[0] % groups:
        return f"{groups} groups of {weight.shape[0]} channels"
    return _qparams("weight", "bias", out, tensors)


def _qparams(weight: str, bias: str, out: int, tensors: Tensors) -> str:
    """One scale and zero point, or one for each of ``out`` rows; a bias of ``out``, or none."""
    scale, zero_point = (tensors.get(f"{weight}_{name}") for name in ("scale", "zero_point"))
    if not _is(scale, (torch.float32, torch.float64), (0, 1)) or scale.numel() not in (1, out):  # type: ignore[union-attr]
        return _told(f"{weight}_scale", scale)
    assert scale is not None
    if not (torch.isfinite(scale).all() and (scale >= 0).all()):
        return f"{weight}_scale is not finite and positive"
    kinds = (torch.int64, torch.int32, torch.float32)
    if not _is(zero_point, kinds, (0, 1)) or zero_point.numel() != scale.numel():  # type: ignore[union-attr]
        return _told(f"{weight}_zero_point", zero_point)
    assert zero_point is not None
    if not (zero_point.double().abs() <= 255).all():
        return f"{weight}_zero_point is not within a byte"
    found = tensors.get(bias)
    good = _is(found, (torch.float32,), (1,)) and found.numel() == out  # type: ignore[union-attr]
    return "" if found is None or good else _told(bias, found)


def _recurrent(config: Any, tensors: Tensors) -> str:
    """The weights of an LSTM, a GRU, or a cell: gates × hidden rows each."""
    from backquant.lower.kernels.recurrent import recurrent_suffixes

    gates = {"lstm": 4, "gru": 3}.get(config.kind, 1)
    rows, layers = gates * config.hidden_size, getattr(config, "num_layers", 0)
    if layers > 1024:
        return f"{layers} layers"
    both = getattr(config, "bidirectional", False)
    suffixes = list(recurrent_suffixes(layers, both)) if layers else [""]
    inner = config.hidden_size * (2 if both else 1)
    for number, suffix in enumerate(suffixes):
        for side in ("ih", "hh"):
            name = f"weight_{side}{suffix}"
            weight = tensors.get(name)
            if config.weight_dtype not in (torch.int8, torch.float16) or not _is(
                weight, (config.weight_dtype,), (2,)
            ):
                return _told(name, weight)
            assert weight is not None
            first = number < (2 if both else 1)
            columns = config.hidden_size if side == "hh" else (weight.shape[1] if first else inner)
            if tuple(weight.shape) != (rows, columns):
                return _told(name, weight)
            wrong = _qparams(name, f"bias_{side}{suffix}", rows, tensors)
            if wrong:
                return wrong
    return ""


def _lookup(config: Any, tensors: Tensors) -> str:  # noqa: ARG001
    table = tensors.get("table")
    good = _is(table, (torch.uint8, torch.int8), (1,)) and table.numel() == 256  # type: ignore[union-attr]
    return "" if good else _told("table", table)


def _table(config: Any, tensors: Tensors) -> str:
    table = tensors.get("table")
    bytes_ = config.columns + 8 if config.bits == 8 else (config.columns + 1) // 2 + 4
    good = _is(table, (torch.uint8,), (2,)) and table.shape[1] == bytes_  # type: ignore[union-attr]
    return "" if good else _told("table", table)


def _lowbit(config: Any, tensors: Tensors) -> str:
    """A weight of int8 in the range of its bits; the group divides the row."""
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if not _is(weight, (torch.int8,), (2,)):
        return _told("weight", weight)
    assert weight is not None
    out, inputs = weight.shape
    in_groups = config.bits == 4
    if in_groups and (config.group not in (32, 64, 128, 256) or inputs % config.group):
        return f"groups of {config.group} of weight {[out, inputs]}"
    if in_groups and bits_of_values(weight) > 4:
        return "weight does not fit into 4 bits"
    good = bias is None or (_is(bias, (torch.float32,), (1,)) and bias.numel() == out)
    grid = (out, inputs // config.group) if in_groups else (out,)
    return _grid("weight_scale", grid, tensors) if good else _told("bias", bias)


def _grouped_table(config: Any, tensors: Tensors) -> str:
    table, scale = tensors.get("table"), tensors.get("scale")
    packed = config.bits == 4
    width = config.columns // 2 if packed else config.columns
    good = _is(table, (torch.uint8 if packed else torch.int8,), (2,)) and not (
        packed and config.columns % 2
    )
    if not good or table.shape[1] != width:  # type: ignore[union-attr]
        return _told("table", table)
    groups = scale.shape[1] if _is(scale, (torch.float32,), (2,)) else 0  # type: ignore[union-attr]
    if not groups or config.columns % groups:
        return _told("scale", scale)
    return _grid("scale", (len(table), groups), tensors)  # type: ignore[arg-type]


def _grid(name: str, shape: tuple[int, ...], tensors: Tensors) -> str:
    scale = tensors.get(name)
    if not _is(scale, (torch.float32,), (len(shape),)) or tuple(scale.shape) != shape:  # type: ignore[union-attr]
        return _told(name, scale)
    assert scale is not None
    positive = bool(torch.isfinite(scale).all() and (scale >= 0).all())
    return "" if positive else f"{name} is not finite and positive"


def _batch_norm(config: Any, tensors: Tensors) -> str:  # noqa: ARG001
    names = ("weight", "bias", "mean", "var")
    first = tensors.get("weight")
    for name in names:
        tensor = tensors.get(name)
        if not _is(tensor, (torch.float32,), (1,)) or tensor.shape != first.shape:  # type: ignore[union-attr]
            return _told(name, tensor)
    return ""


def _norm(config: Any, tensors: Tensors) -> str:
    wanted = len(config.size) if config.kind == "layer" else 1
    if config.kind == "group" and len(config.size) != 1:
        return f"groups {config.size}"
    for name in ("weight", "bias"):
        tensor = tensors.get(name)
        if tensor is not None and not _is(tensor, (torch.float32,), (wanted,)):
            return _told(name, tensor)
        if tensor is not None and config.kind == "layer" and tuple(tensor.shape) != config.size:
            return _told(name, tensor)
    pair = [tensors.get(name) for name in ("weight", "bias")]
    if None not in pair and pair[0].shape != pair[1].shape:  # type: ignore[union-attr]
        return _told("bias", pair[1])
    return ""


_CHECKERS: dict[str, Callable[[Any, Tensors], str]] = {
    "PackedKernel": _weighted,
    "DynamicLinear": _weighted,
    "QuantizedRecurrent": _recurrent,
    "QuantizedCell": _recurrent,
    "Lookup": _lookup,
    "_Table": _table,
    "LowbitLinear": _lowbit,
    "GroupedTable": _grouped_table,
    "BatchNorm": _batch_norm,
    "Norm": _norm,
    **integer_checks.CHECKERS,
}
