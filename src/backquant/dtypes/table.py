"""The table of dtypes that values are quantized to, and how others are added to it.

A package adds its own with an entry point of the group ``backquant.dtypes`` that names a ``QDType``; a
program adds one with ``register_dtype``. Entry points are read when a dtype is asked for that has no row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import metadata
from typing import Any
from zlib import crc32

import torch

from backquant.entry_points import read_entry_point
from backquant.errors import ConfigError

# What is true of one dtype that values are quantized to.


class Format(Enum):
    """How stored values represent numbers."""

    SIGNED = "signed integers"  # value = (q - zero_point) * scale
    UNSIGNED = "unsigned integers"
    FLOAT = "narrow floats with a scale"  # value = q * scale
    CAST = "narrower floats"  # value = q: no scale, no zero point
    FULL = "floats as they are"


@dataclass(frozen=True)
class QDType:
    """One row of the table of dtypes; ``register_dtype`` adds one.

    * ``token``: the ``torch.dtype`` that configs, descriptions and observers name it by. PyTorch has some
      without any operator, such as ``torch.uint6`` or ``torch.int4``.
    * ``storage``: the plain dtype of the tensors that hold its values.
    * ``bits``: the width of one value; of integers it gives the range.
    * ``tensor_token``: whether PyTorch has quantized tensors of ``token``, which
      ``torch.quantize_per_tensor`` makes (``torch.quint8`` and the like).
    * ``packed``: several values share a byte in PyTorch's kernels, which take weights only.
    * ``symmetric_zero_point``: the zero point of symmetric schemes; None: the middle of the range.
    * ``largest``: the largest value of a narrow float, where it is not that of the storage.
    * ``number``: the number of the dtype in saved modules; None: derived from its name.

    >>> row = QDType(torch.uint6, torch.uint8, 6, Format.UNSIGNED)
    >>> row.low, row.high, row.name, row.middle
    (0, 63, 'uint6', 32)
    """

    token: torch.dtype
    storage: torch.dtype
    bits: int
    format: Format
    tensor_token: bool = False
    packed: bool = False
    symmetric_zero_point: int | None = None
    number: int | None = None
    largest: int | None = None

    @property
    def name(self) -> str:
        """The token without ``torch.``."""
        return str(self.token).removeprefix("torch.")

    @property
    def is_integer(self) -> bool:
        """Whether values are integers, with scale and zero point."""
        return self.format in (Format.SIGNED, Format.UNSIGNED)

    @property
    def is_float(self) -> bool:
        """Whether values are narrow floats that have a scale."""
        return self.format is Format.FLOAT

    @property
    def has_scale(self) -> bool:
        """Whether values are divided by a scale, and not only cast."""
        return self.is_integer or self.is_float

    @property
    def is_stored(self) -> bool:
        """Whether weights are stored in this dtype: all but full floats, which they are already."""
        return self.format is not Format.FULL

    @property
    def is_observed(self) -> bool:
        """Whether activations of this dtype get an observer: stored dtypes other than packed integers."""
        return self.is_stored and (self.is_float or not self.packed)

    @property
    def low(self) -> int:
        """The smallest value that is stored."""
        if not self.is_integer:
            return -self.high
        return -(1 << (self.bits - 1)) if self.format is Format.SIGNED else 0

    @property
    def high(self) -> int:
        """The largest finite value that is stored."""
        if not self.is_integer and self.largest is not None:
            return self.largest
        if not self.is_integer:
            return int(torch.finfo(self.storage).max)
        return (1 << (self.bits - 1)) - 1 if self.format is Format.SIGNED else (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero point of symmetric schemes over the whole range."""
        if self.symmetric_zero_point is not None:
            return self.symmetric_zero_point
        return 1 << (self.bits - 1) if self.format is Format.UNSIGNED else 0

    @property
    def code(self) -> int:
        """``number``, or else one that is derived from the name."""
        return (1 << 32) + crc32(self.name.encode()) if self.number is None else self.number


def _unstubbed(name: str) -> torch.dtype:
    """A token of few bits that PyTorch has, and its type stubs have not."""
    found: torch.dtype = getattr(torch, name)
    return found


INT4, UINT4 = _unstubbed("int4"), _unstubbed("uint4")
INT3, UINT3 = _unstubbed("int3"), _unstubbed("uint3")
INT2, UINT2 = _unstubbed("int2"), _unstubbed("uint2")
E2M1: torch.dtype = torch.float4_e2m1fn_x2  # PyTorch's tensors of it hold two in a byte
_GROUP = "backquant.dtypes"
_SIGNED, _UNSIGNED, _FLOAT, _CAST = Format.SIGNED, Format.UNSIGNED, Format.FLOAT, Format.CAST

# The numbers are part of the file format: they are only ever added to.
_BUILT_IN = (
    QDType(torch.float32, torch.float32, 32, Format.FULL, number=0),
    QDType(torch.float16, torch.float16, 16, _CAST, number=1),
    QDType(torch.bfloat16, torch.bfloat16, 16, _CAST, number=2),
    QDType(torch.qint8, torch.int8, 8, _SIGNED, tensor_token=True, number=3),
    QDType(torch.int8, torch.int8, 8, _SIGNED, number=4),
    QDType(torch.quint8, torch.uint8, 8, _UNSIGNED, tensor_token=True, number=5),
    QDType(torch.uint8, torch.uint8, 8, _UNSIGNED, number=6),
    # Symmetric schemes: PyTorch's observers give packed dtypes the zero point 0.
    QDType(torch.quint4x2, torch.uint8, 4, _UNSIGNED, True, True, 0, number=7),
    QDType(torch.int16, torch.int16, 16, _SIGNED, number=8),
    QDType(torch.qint32, torch.int32, 32, _SIGNED, tensor_token=True, number=9),
    QDType(torch.int32, torch.int32, 32, _SIGNED, number=10),
    QDType(torch.float8_e4m3fn, torch.float8_e4m3fn, 8, _FLOAT, number=11),
    QDType(torch.float8_e5m2, torch.float8_e5m2, 8, _FLOAT, number=12),
    QDType(torch.uint16, torch.uint16, 16, _UNSIGNED, number=13),
    QDType(torch.quint2x4, torch.uint8, 2, _UNSIGNED, True, True, 0, number=14),
    # One value a byte in memory; saved models hold as many as there are bits for.
    QDType(INT4, torch.int8, 4, _SIGNED, number=15),
    QDType(UINT4, torch.uint8, 4, _UNSIGNED, number=16),
    QDType(INT2, torch.int8, 2, _SIGNED, number=17),
    QDType(UINT2, torch.uint8, 2, _UNSIGNED, number=18),
    QDType(INT3, torch.int8, 3, _SIGNED, number=20),
    QDType(UINT3, torch.uint8, 3, _UNSIGNED, number=21),
    # E4M3 holds every value of E2M1: one a byte in memory.
    QDType(E2M1, torch.float8_e4m3fn, 4, _FLOAT, number=19, largest=6, packed=True),
)
_ROWS = {row.token: row for row in _BUILT_IN}


def register_dtype(row: QDType) -> None:
    """Add a row: from now on observers, descriptions, reference models and files know the dtype.

    The same row again does nothing. Raises ConfigError for a row that contradicts one that is there, and
    for a storage that does not hold the range.

    >>> register_dtype(QDType(torch.quint8, torch.int8, 8, Format.SIGNED))
    Traceback (most recent call last):
    backquant.errors.ConfigError: torch.quint8 has another row in the table of dtypes
      where  register_dtype: int8, 8 bits, signed integers
      fix    keep the row that is there: uint8, 8 bits, unsigned integers
    """
    there = _ROWS.get(row.token)
    if there == row:
        return
    if there is not None:
        raise ConfigError(
            f"{row.token} has another row in the table of dtypes",
            where=f"register_dtype: {_text(row)}",
            fix=f"keep the row that is there: {_text(there)}",
        )
    _check(row)
    _ROWS[row.token] = row


def _text(row: QDType) -> str:
    storage = str(row.storage).removeprefix("torch.")
    return f"{storage}, {row.bits} bits, {row.format.value}"


def _check(row: QDType) -> None:
    held = integer_range(row.storage) if row.is_integer else None
    fits = held is not None and held[0] <= row.low and row.high <= held[1]
    if row.is_integer and not fits:
        raise ConfigError(
            f"{row.storage} does not hold the values of {row.token}, {row.low} to {row.high}",
            where=f"register_dtype: {_text(row)}",
            fix=f"QDType({row.token}, torch.int16, {row.bits}, ...)",
        )
    same = next((other.token for other in _ROWS.values() if other.code == row.code), None)
    if same is not None:
        raise ConfigError(
            f"{row.token} and {same} have the same number {row.code} in saved models",
            where=f"register_dtype: {_text(row)}",
            fix=f"QDType({row.token}, ..., number=N) with a number above 1000 that is free",
        )


@cache
def _read_entry_points() -> None:
    for point in metadata.entry_points(group=_GROUP):
        fix = "QDType(token, storage, bits, format)"
        register_dtype(read_entry_point(point, QDType, "dtype", ConfigError, fix))


def known_dtypes() -> tuple[QDType, ...]:
    """All rows, those of installed packages too.

    >>> [row.name for row in known_dtypes()][3:6]
    ['qint8', 'int8', 'quint8']
    """
    _read_entry_points()
    return tuple(_ROWS.values())


def find_dtype(token: torch.dtype | None) -> QDType | None:
    """The row of ``token``; None when it has none.

    >>> find_dtype(torch.quint8).bits, find_dtype(torch.int64)
    (8, None)
    """
    if token not in _ROWS and token is not None:
        _read_entry_points()
    return _ROWS.get(token)  # type: ignore[arg-type]


def qdtype(token: torch.dtype) -> QDType:
    """The row of ``token``. Raises ConfigError for a dtype that nothing is quantized to.

    >>> qdtype(torch.int64)
    Traceback (most recent call last):
    backquant.errors.ConfigError: torch.int64 is not in the table of dtypes that values are quantized to
      where  torch.int64
      fix    backquant.dtypes.register_dtype(QDType(torch.int64, storage, bits, format))
    """
    row = find_dtype(token)
    if row is None:
        raise ConfigError(
            f"{token} is not in the table of dtypes that values are quantized to",
            where=str(token),
            fix=f"backquant.dtypes.register_dtype(QDType({token}, storage, bits, format))",
        )
    return row


def storage_dtype(token: torch.dtype) -> torch.dtype:
    """The plain dtype in which values of a quantized dtype are stored.

    Raises ConfigError for a dtype that is not a quantized one.

    >>> storage_dtype(torch.quint8), storage_dtype(torch.quint4x2)
    (torch.uint8, torch.uint8)
    """
    row = find_dtype(token)
    if row is None or not row.has_scale:
        raise ConfigError(
            f"{token} has no quantized storage",
            where="storage_dtype",
            fix="use one of " + ", ".join(str(r.token) for r in known_dtypes() if r.has_scale),
        )
    return row.storage


def plain_dtype(dtype: torch.dtype) -> torch.dtype:
    """The storage of a token; any other dtype as it is.

    >>> plain_dtype(torch.quint8), plain_dtype(torch.int64)
    (torch.uint8, torch.int64)
    """
    row = find_dtype(dtype)
    return dtype if row is None else row.storage


@cache
def tensor_token(storage: torch.dtype) -> torch.dtype:
    """The dtype of PyTorch's quantized tensors over this storage.

    >>> tensor_token(torch.uint8), tensor_token(torch.int32)
    (torch.quint8, torch.qint32)
    """
    rows = (row for row in _BUILT_IN if row.tensor_token and not row.packed)
    return {row.storage: row.token for row in rows}[storage]


def is_quantized(dtype: torch.dtype | None) -> bool:
    """Whether values of this dtype are integers or narrow floats with a scale.

    >>> is_quantized(torch.uint16), is_quantized(torch.float16)
    (True, False)
    """
    row = find_dtype(dtype)
    return row is not None and row.has_scale


def is_scaled_float(dtype: torch.dtype | None) -> bool:
    """Whether values of this dtype are narrow floats with a scale, such as those of 8 bits.

    >>> is_scaled_float(torch.float8_e5m2), is_scaled_float(torch.float16)
    (True, False)
    """
    row = find_dtype(dtype)
    return row is not None and row.is_float


def is_narrow_float(dtype: torch.dtype | None) -> bool:
    """Whether it is a float that values are only cast to, without a scale: float16 and bfloat16.

    >>> is_narrow_float(torch.bfloat16), is_narrow_float(torch.float32)
    (True, False)
    """
    row = find_dtype(dtype)
    return row is not None and row.format is Format.CAST


def integer_range(dtype: torch.dtype | None) -> tuple[int, int] | None:
    """Smallest and largest value of one element; None for dtypes of floats.

    >>> integer_range(torch.qint8), integer_range(torch.quint4x2), integer_range(torch.float16)
    ((-128, 127), (0, 15), None)
    """
    row = find_dtype(dtype)
    if row is not None:
        return (row.low, row.high) if row.is_integer else None
    if dtype is None or dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return None
    without_operators = re.fullmatch(r"torch\.(u?)int([1-7])", str(dtype))
    if without_operators is not None:
        unsigned, count = without_operators[1], 2 ** int(without_operators[2])
        return (0, count - 1) if unsigned else (-count // 2, count // 2 - 1)
    try:
        info = torch.iinfo(dtype)
    except TypeError:  # bits8 and the like hold no numbers
        return None
    return info.min, info.max


def quantize_bounds(dtype: torch.dtype, reduce_range: bool = False) -> tuple[int, int]:
    """Smallest and largest value of a quantized dtype.

    ``reduce_range`` drops one bit of the 8-bit integers (the others have no reduced form).

    >>> quantize_bounds(torch.qint8), quantize_bounds(torch.quint8, reduce_range=True)
    ((-128, 127), (0, 127))
    """
    row = qdtype(dtype)
    if reduce_range and row.is_integer and row.bits == 8:
        return row.low // 2, row.high // 2
    return row.low, row.high


# Dtypes as messages, reports and files write them.
def dtype_name(dtype: torch.dtype | None) -> str:
    """``quint8`` for ``torch.quint8``; ``any dtype`` for None.

    >>> dtype_name(torch.quint8), dtype_name(torch.float), dtype_name(None)
    ('quint8', 'float32', 'any dtype')
    """
    return "any dtype" if dtype is None else str(dtype).removeprefix("torch.")


# Quantization schemes: per tensor or per channel, affine or symmetric; as tensors they travel in files.

_PER_TENSOR = frozenset({torch.per_tensor_affine, torch.per_tensor_symmetric})
_PER_CHANNEL = frozenset(
    {
        torch.per_channel_affine,
        torch.per_channel_symmetric,
        torch.per_channel_affine_float_qparams,
    }
)
_SYMMETRIC = frozenset({torch.per_tensor_symmetric, torch.per_channel_symmetric})

# The codes are part of the file format: they are only ever added to.
_QSCHEMES: dict[int, torch.qscheme | None] = {
    0: None,
    1: torch.per_tensor_affine,
    2: torch.per_tensor_symmetric,
    3: torch.per_channel_affine,
    4: torch.per_channel_symmetric,
    5: torch.per_channel_affine_float_qparams,
}
_CODES = {qscheme: code for code, qscheme in _QSCHEMES.items()}


def is_per_tensor(qscheme: Any) -> bool:
    """Whether one scale serves the whole tensor.

    >>> is_per_tensor(torch.per_tensor_symmetric)
    True
    """
    return qscheme in _PER_TENSOR


def is_per_channel(qscheme: Any) -> bool:
    """Whether every channel has its own scale.

    >>> is_per_channel(torch.per_tensor_symmetric)
    False
    """
    return qscheme in _PER_CHANNEL


def is_symmetric(qscheme: Any) -> bool:
    """Whether the zero point is fixed at the middle of the range.

    >>> is_symmetric(torch.per_channel_symmetric)
    True
    """
    return qscheme in _SYMMETRIC


def encode_schemes(schemes: Sequence[tuple[Any, ...]]) -> torch.Tensor:
    """One row ``[qscheme, dtype, axis, quant_min, quant_max]`` per weight, int64: a ``state_dict`` holds
    nothing but tensors.

    >>> encode_schemes([(torch.per_channel_affine, torch.qint8, 0, -127, 127)])
    tensor([[   3,    3,    0, -127,  127]])
    """
    rows = [[_CODES[qscheme], qdtype(dtype).code, *numbers] for qscheme, dtype, *numbers in schemes]
    return torch.tensor(rows, dtype=torch.int64)


def decode_schemes(state: torch.Tensor) -> list[tuple[Any, ...]]:
    """The inverse of ``encode_schemes``; ``ConfigError`` on anything else.

    >>> decode_schemes(torch.tensor([[3, 3, 0, -127, 127]]))
    [(torch.per_channel_affine, torch.qint8, 0, -127, 127)]
    """
    readable = isinstance(state, torch.Tensor) and state.dim() == 2 and state.shape[1] == 5
    rows = state.tolist() if readable else []
    dtypes = {row.code: row.token for row in known_dtypes()}
    if not rows or any(row[0] not in _QSCHEMES or row[1] not in dtypes for row in rows):
        raise ConfigError(
            "the schemes of weights in the state_dict cannot be read",
            where=f"weight_qscheme, weight_dtype, … = {state!r}",
            fix="load a state_dict that a reference module of backquant wrote; a dtype that a program "
            "registers has to be registered here, too",
        )
    return [(_QSCHEMES[row[0]], dtypes[row[1]], *row[2:]) for row in rows]
