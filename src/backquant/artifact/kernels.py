"""What a file may say to our kernels: their functions' arguments, and their modules' numbers.

Kernels get memory and numbers that lowering chose, and engines below them check little of it. So
everything that comes from a file is checked before a kernel is built or a graph that calls one:

1. Functions: those of ``FUNCTIONS``, and every argument that is no tensor is a literal.
2. Numbers, of functions and of modules alike, by their names: scales are finite and above 0, zero points
   fit their integers, windows and strides are positive and small, dtypes and names are known ones.
3. Tensors of modules: ``kernel_tensors``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import torch
from torch.fx import Node

from backquant.artifact import integer_checks
from backquant.dtypes import Requantization, Rounding, bits_of_values
from backquant.errors import ArtifactError
from backquant.lower.kernels import attention

PACKAGE = "backquant.lower.kernels"
_POOLING = [f"{kind}_pool{n}d" for kind in ("adaptive_avg", "avg", "max") for n in (1, 2, 3)]
FUNCTIONS = frozenset(
    f"{PACKAGE}.{path}"
    for path in [
        "activation.clamp",
        "attention.attended",
        "attention.attended_whole",
        *(
            f"boundary.{name}"
            for name in ("dequantize", "multiply", "quantize", "requantize", "saturate")
        ),
        *(f"elementwise.{name}" for name in ("add", "add_relu", "mul", "mul_relu")),
        "integer.resize.nearest",
        "integer.resize.padded",
        "integer.values.rescale",
        "join.cat",
        "matrix.matmul",
        "matrix.softmax",
        *(f"pooling.{name}" for name in (*_POOLING, "mean")),
        "resize.resize_bilinear",
        "shuffle.shuffle",
    ]
)
_LARGEST_WINDOW = 1 << 16
_LARGEST_SIZE = 1 << 31
_INTEGERS = (torch.uint8, torch.int8, torch.int32)
_DTYPES = (*_INTEGERS, torch.float32, torch.float16, torch.bfloat16)
_WORDS = {
    "post_op": frozenset(
        [
            *("none", "relu", "hardtanh", "hardswish", "swish", "gelu", "leaky_relu", "tanh"),
            *("sum", "sigmoid"),
        ]
    ),
    "post_algorithm": frozenset(("", "none", "tanh")),
    "engine": frozenset(("fbgemm", "x86", "qnnpack", "onednn")),
    "kind": frozenset(("layer", "group", "instance", "lstm", "gru", "rnn_tanh", "rnn_relu")),
    "mode": frozenset(("sum", "mean")),
    "requantization": frozenset(each.value for each in Requantization),
    "rounding": frozenset(each.value for each in Rounding),
    "pad_mode": frozenset(("constant", "reflect", "replicate", "circular")),
    "resize_mode": frozenset(("nearest", "nearest-exact")),
}

#: Of kernels of the integer reference: whole numbers, with the least and the largest.
_BETWEEN = {
    "accumulator_bits": (32, 40),
    "headroom": (0, 20),
    "root_bits": (0, 8),
    "channels": (1, 1 << 24),
    "pad": (-_LARGEST_WINDOW, _LARGEST_WINDOW),
    "fill": (-_LARGEST_WINDOW, _LARGEST_WINDOW),
}
_OPERATORS = frozenset(f"{n}{relu}" for n in integer_checks.WEIGHTED for relu in ("", "_relu"))
_POST_NUMBERS = {"hardtanh": 2, "leaky_relu": 1}


def check_arguments(function: Callable[..., Any], args: Any, kwargs: Any, where: str) -> None:
    """Arguments of a call in a graph of one of ``FUNCTIONS``. Raises ``ArtifactError``."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise ArtifactError(f"{function.__name__}: {error}", where=where) from None
    for name, value in bound.arguments.items():
        if name in ("x", "y", "keys", "values", "parts"):
            nodes = value if isinstance(value, (list, tuple)) else [value]
            good = bool(nodes) and all(isinstance(node, Node) for node in nodes)
        else:
            good = _is_good(name, value)
        if not good:
            raise _bad(f"{name}={value!r}", function.__name__, where)


def check_config(cls: type, config: Any, where: str) -> None:
    """The decoded configuration of a kernel module. Raises ``ArtifactError``.

    >>> from backquant.lower.kernels.norm import Norm, NormConfig
    >>> check_config(Norm, NormConfig("group", (0,), 1e-5, 1.0, 0, 1.0, 0), "norm")
    Traceback (most recent call last):
    backquant.errors.ArtifactError: Norm cannot be built with size=(0,)
      where  norm
    """
    for name, value in vars(config).items():
        good = value in _OPERATORS if _is_operator(config, name) else _is_good(name, value)
        if not good:
            raise _bad(f"{name}={value!r}", cls.__name__, where)
    post_op = getattr(config, "post_op", "none")
    numbers = getattr(config, "post_numbers", ())
    if len(numbers) != _POST_NUMBERS.get(post_op, 0) and not (post_op == "relu" and not numbers):
        raise _bad(f"post_numbers={numbers!r}", cls.__name__, where)


def _is_operator(config: Any, name: str) -> bool:
    return name == "operator" and hasattr(config, "engine")


def _bad(what: str, name: str, where: str) -> ArtifactError:
    return ArtifactError(f"{name} cannot be built with {what[:120]}", where=where)


def _is_good(name: str, value: Any) -> bool:
    """Whether ``value`` can be the number or word called ``name``."""
    if isinstance(value, (list, tuple)) and name in ("scales", "zero_points", "fits"):
        return all(_is_good(name[:-1], item) for item in value)
    if name in _WORDS:
        return value in _WORDS[name]
    if name.endswith("scale"):
        return _is_number(value) and 0 < value < math.inf
    if name.endswith("zero_point") or name in ("quant_min", "quant_max", "low", "high"):
        return _is_whole(value) and abs(value) < _LARGEST_SIZE
    if name in _BETWEEN:
        return _all(_literals(value), *_BETWEEN[name])
    if name == "negative_slope":
        return _is_number(value) and math.isfinite(value)
    if name == "integer_dtype":
        return value in integer_checks.DTYPES
    if name.endswith("dtype"):
        return value in (_INTEGERS if name == "dtype" else _DTYPES)
    if name in ("kernel_size", "stride", "dilation"):
        return _all(value, 1, _LARGEST_WINDOW)
    if name in ("padding", "output_padding"):
        return _all(value, 0, _LARGEST_WINDOW)
    if name in ("groups", "hidden_size", "num_layers", "columns"):
        return _is_whole(value) and 1 <= value <= _LARGEST_SIZE
    if name == "dims":
        return value in (1, 2, 3)
    if name == "bits":
        return value in (4, 8)
    if name == "group":
        return _is_whole(value) and 0 <= value <= _LARGEST_WINDOW
    if name in ("size", "output_size", "first", "last"):
        return _is_size(name, value)
    if name == "eps":
        return _is_number(value) and 0 <= value < math.inf
    if name in ("scale_factor", "post_numbers", "divisor_override"):
        return _are_numbers(value, name)
    if name in ("dim", "axis"):
        return _all(value, -64, 64)
    if name == "operator":
        return isinstance(value, str)
    if name in ("between", "mask", "factor", "is_causal"):
        return _is_of_attention(name, value)
    return value is None or isinstance(value, bool)


def _are_numbers(value: Any, name: str) -> bool:
    found = value if isinstance(value, (list, tuple)) else [value]
    if name == "post_numbers":
        return all(_is_number(item) and not math.isnan(item) for item in found)
    return value is None or all(_is_number(v) and 2**-16 <= v <= 2**16 for v in found)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _all(value: Any, low: int, high: int) -> bool:
    found = value if isinstance(value, (list, tuple)) else [value]
    return len(found) <= 16 and all(
        item is None or (_is_whole(item) and low <= item <= high) for item in found
    )


def _literals(value: Any) -> list[Any]:
    found = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in found if not isinstance(item, Node)]


def _is_size(name: str, value: Any) -> bool:
    """Sizes may be computed from those of the input: the operators check them."""
    return _all(_literals(value), -1 if name in ("first", "last") else 1, _LARGEST_SIZE)


_LONGEST = 64  # steps between two products


def _is_of_attention(name: str, value: Any) -> bool:
    """What happens to the scores of attention, step by step; what is added to them; their factor."""
    if name == "mask":
        return value is None or isinstance(value, Node)
    if name == "is_causal":
        return isinstance(value, (bool, Node))
    if name == "factor":
        return value is None or (_is_number(value) and math.isfinite(value))
    steps = value if isinstance(value, (list, tuple)) else [None]
    return len(steps) <= _LONGEST and all(map(_is_step, steps))


def _is_step(step: Any) -> bool:
    """One step of ``lower.kernels.attention``: a word, and what it takes."""
    if not isinstance(step, (list, tuple)) or len(step) != 2 or not isinstance(step[0], str):
        return False
    word, given = step
    if word == "reshape":
        return isinstance(given, (list, tuple)) and _is_size("first", given)
    if word == "masked_fill":
        two = isinstance(given, (list, tuple)) and len(given) == 2
        return two and isinstance(given[0], Node) and _is_number(given[1])
    if word in attention.QUERIES:
        return _is_number(given)
    return word in attention.STEPS and (isinstance(given, Node) or _is_number(given))


# The tensors of a kernel module that a file builds: dtypes and shapes that belong together.
#
# Engines below the kernels check little of it, and read memory by it.

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


def _is(
    tensor: torch.Tensor | None, dtypes: Sequence[torch.dtype], dims: Sequence[int]
) -> TypeGuard[torch.Tensor]:
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
    if not _is(scale, (torch.float32, torch.float64), (0, 1)) or scale.numel() not in (1, out):
        return _told(f"{weight}_scale", scale)
    if not (torch.isfinite(scale).all() and (scale >= 0).all()):
        return f"{weight}_scale is not finite and positive"
    kinds = (torch.int64, torch.int32, torch.float32)
    if not _is(zero_point, kinds, (0, 1)) or zero_point.numel() != scale.numel():
        return _told(f"{weight}_zero_point", zero_point)
    if not (zero_point.double().abs() <= 255).all():
        return f"{weight}_zero_point is not within a byte"
    found = tensors.get(bias)
    good = _is(found, (torch.float32,), (1,)) and found.numel() == out
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
    good = _is(table, (torch.uint8, torch.int8), (1,)) and table.numel() == 256
    return "" if good else _told("table", table)


def _table(config: Any, tensors: Tensors) -> str:
    table, weight = tensors.get("table"), tensors.get("weight")
    if weight is not None:
        return _of_rows(config, weight, tensors)
    bytes_ = config.columns + 8 if config.bits == 8 else (config.columns + 1) // 2 + 4
    good = _is(table, (torch.uint8,), (2,)) and table.shape[1] == bytes_
    return "" if good else _told("table", table)


def _of_rows(config: Any, weight: torch.Tensor, tensors: Tensors) -> str:
    """What a table is made of: integers of its bits, numbers of each row or of all."""
    good = _is(weight, (torch.uint8,), (2,)) and weight.shape[1] == config.columns
    if not good or int(weight.max()) >> config.bits:
        return _told("weight", weight)
    for name in ("weight_scale", "weight_zero_point"):
        numbers = tensors.get(name)
        if not _is(numbers, (torch.float32, torch.float64, torch.int64), (0, 1)):
            return _told(name, numbers)
        if numbers.numel() not in (1, len(weight)) or not numbers.isfinite().all():
            return _told(name, numbers)
    return ""


def _lowbit(config: Any, tensors: Tensors) -> str:
    """A weight of int8 in the range of its bits; the group divides the row."""
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if not _is(weight, (torch.int8,), (2,)):
        return _told("weight", weight)
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
    table, scale, weight = (tensors.get(name) for name in ("table", "scale", "weight"))
    if weight is not None:
        good = _is(weight, (torch.int8,), (2,)) and weight.shape[1] == config.columns
        return _grouped_grid(weight, tensors) if good else _told("weight", weight)
    packed = config.bits == 4
    width = config.columns // 2 if packed else config.columns
    if not _is(table, (torch.uint8 if packed else torch.int8,), (2,)):
        return _told("table", table)
    if (packed and config.columns % 2) or table.shape[1] != width:
        return _told("table", table)
    groups = scale.shape[1] if _is(scale, (torch.float32,), (2,)) else 0
    if not groups or config.columns % groups:
        return _told("scale", scale)
    return _grid("scale", (len(table), groups), tensors)


def _grouped_grid(weight: torch.Tensor, tensors: Tensors) -> str:
    scale = tensors.get("weight_scale")
    if scale is None or scale.dim() not in (1, 2):
        return _told("weight_scale", scale)
    groups = scale.shape[1:].numel()
    if not groups or weight.shape[1] % groups:
        return _told("weight_scale", scale)
    return _grid("weight_scale", (len(weight), groups)[: scale.dim()], tensors)


def _grid(name: str, shape: tuple[int, ...], tensors: Tensors) -> str:
    scale = tensors.get(name)
    if not _is(scale, (torch.float32,), (len(shape),)) or tuple(scale.shape) != shape:
        return _told(name, scale)
    positive = bool(torch.isfinite(scale).all() and (scale >= 0).all())
    return "" if positive else f"{name} is not finite and positive"


def _batch_norm(config: Any, tensors: Tensors) -> str:  # noqa: ARG001
    first = tensors.get("weight")
    for name in ("weight", "bias", "mean", "var"):
        tensor = tensors.get(name)
        if first is None or not _is(tensor, (torch.float32,), (1,)) or tensor.shape != first.shape:
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
    weight, bias = (tensors.get(name) for name in ("weight", "bias"))
    if weight is not None and bias is not None and weight.shape != bias.shape:
        return _told("bias", bias)
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
